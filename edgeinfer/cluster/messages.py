"""Settings of the Ray Serve application, and messages between its front end and its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from edgeinfer.errors import UsageError

#: Headers that belong to one connection and must not be forwarded (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
#: Headers of a request that are left out when it is forwarded, because the HTTP client sets its own.
_SET_ANEW = frozenset(("host", "content-length"))

Headers = tuple[tuple[str, str], ...]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one model's deployment.

    - `model`: name or path of the model, as for `edgeinfer serve`.
    - `serve`: further arguments of `edgeinfer serve`, e.g. `("--ctx", "8192")`.
    - `min_replicas`, `max_replicas`: limits of their number. Ray adds a replica for each
      `target_ongoing_requests` running or waiting requests, and removes one that was idle for `idle_s`.
    - `max_ongoing_requests`: requests that one replica accepts at a time.
    - `cpus`: CPU cores that each replica reserves and uses.
    """

    model: str
    serve: tuple[str, ...] = ()
    min_replicas: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    max_ongoing_requests: Annotated[int, msgspec.Meta(ge=1)] = 64
    idle_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    cpus: Annotated[int, msgspec.Meta(ge=1)] = 1


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the application. The first model answers requests that name no model.

    A request gets an error 503 if no replica has accepted it within `start_s` (s). A request's Host
    header must be localhost, an IP address, or one of `hosts`.
    """

    models: Annotated[tuple[ModelSettings, ...], msgspec.Meta(min_length=1)]
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    hosts: tuple[str, ...] = ()


def read_settings(arguments: Mapping[str, object]) -> Settings:
    """Convert the fields of `Settings`, or of one `ModelSettings`. Raises UsageError if invalid."""
    table = arguments if "models" in arguments else {"models": [arguments]}
    try:
        settings = msgspec.convert(table, Settings, strict=False)
    except msgspec.ValidationError as error:
        problem = f"invalid arguments of the application: {error}"
        raise UsageError(problem, hint="correct the arguments of `serve run`") from error
    names = [model.model for model in settings.models]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        problem = f"`models` names a model twice: {', '.join(sorted(doubled))}"
        raise UsageError(problem, hint="give each model one entry")
    return settings


class Request(NamedTuple):
    """A client's HTTP request.

    `target` is the path with the query. `prefix_hashes` are hashes of the prompt's prefixes, from which
    `PrefixRouter` chooses a replica.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    prefix_hashes: tuple[int, ...] = ()


class Ack(NamedTuple):
    """The first message of a replica, before the response: the replica has accepted the request.

    `replica` is the id that Ray has given to the replica.
    """

    replica: str


class ResponseStart(NamedTuple):
    """HTTP status and headers of a response."""

    status: int
    headers: Headers


#: A replica answers with an `Ack`, a `ResponseStart`, and then the body in pieces.
Chunk = Ack | ResponseStart | bytes


def strip_hop_by_hop(headers: Headers) -> Headers:
    """Return the headers that a proxy forwards, with names in lower case.

    Host, Content-Length, and headers that concern only one connection (Keep-Alive) are left out.
    """
    lower = ((name.lower(), value) for name, value in headers)
    return tuple((name, value) for name, value in lower if name not in _HOP_BY_HOP | _SET_ANEW)
