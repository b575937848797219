"""Settings of a Serve application, and the messages between its front end and its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from edgeinfer.errors import UsageError

#: Headers of one connection (RFC 9110, 7.6.1), and those that the next connection sets itself.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
_SET_ANEW = frozenset(("host", "content-length"))

Headers = tuple[tuple[str, str], ...]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's deployment.

    `serve` are further arguments of `edgeinfer serve`, as typed. Ray runs `min_replicas` to
    `max_replicas` replicas, one per `target_ongoing_requests` running or waiting requests, and removes
    a replica that was idle for `idle_s` (s). A replica computes on `cpus` reserved cores.
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
    """The models of an application; the first answers requests that name none.

    A request that no replica accepted within `start_s` (s) is answered with a 503. `hosts` are accepted
    host names besides loopback's and addresses.
    """

    models: Annotated[tuple[ModelSettings, ...], msgspec.Meta(min_length=1)]
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    hosts: tuple[str, ...] = ()


def read_settings(arguments: Mapping[str, object]) -> Settings:
    """Read `{"models": [...]}` or one model's fields. Raises UsageError that names the wrong field."""
    table = arguments if "models" in arguments else {"models": [arguments]}
    try:
        settings = msgspec.convert(table, Settings, strict=False)
    except msgspec.ValidationError as error:
        problem = f"invalid arguments of the application: {error}"
        raise UsageError(problem, hint="see docs/guides/ray.md") from error
    names = [model.model for model in settings.models]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UsageError(f"models named twice: {', '.join(sorted(doubled))}", hint="name each once")
    return settings


class Request(NamedTuple):
    """A client's request. `prefix_hashes` are those of its prompt (`prefix_affinity.prefix_hashes`)."""

    method: str
    target: str
    headers: Headers
    body: bytes
    prefix_hashes: tuple[int, ...] = ()


class Ack(NamedTuple):
    """The replica (Ray's id) that accepted the request; its answer follows."""

    replica: str


class ResponseStart(NamedTuple):
    """Status and headers of a response."""

    status: int
    headers: Headers


#: An answer is an `Ack`, a `ResponseStart`, then the body in pieces.
Chunk = Ack | ResponseStart | bytes


def strip_hop_by_hop(headers: Headers) -> Headers:
    """Return the headers that a proxy forwards, with names in lower case."""
    lower = ((name.lower(), value) for name, value in headers)
    return tuple((name, value) for name, value in lower if name not in _HOP_BY_HOP | _SET_ANEW)
