"""What a dialect is: operations and an error envelope. Each is a folder beside this one.

A folder holds the wire types (`wire.py`), the way in (`translate.py`), the way out (`render.py`), the
handlers (`routes.py`) and, in `dialect.py`, the `Dialect` that `server/operations.py` collects.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.server.core.problems import Problem
from edgeinfer.server.core.renderer import sse_comment

Handler = Callable[[Request], Awaitable[Response]]
#: (problem, request id) → bytes
Envelope = Callable[[Problem, str], bytes]


class Operation(msgspec.Struct, frozen=True):
    """One method of one path. `uses_model`: it counts against the limits and is refused while draining.

    `is_admin`: it changes what others get, or tells of it. `may_store`: its answers may be kept, to be
    read again by id. `is_list`: the answer is a list of `reply`, `takes_list`: its body is one of
    `body`. `list_of`: some bodies get a list of these. `also` are further JSON answers by status, for
    the OpenAPI document.
    """

    path: str
    handler: Handler
    summary: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    reply: type[msgspec.Struct] | None = None
    is_list: bool = False
    list_of: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    takes_list: bool = False
    query: type[msgspec.Struct] | None = None
    streams: bool = False
    uses_model: bool = True
    is_admin: bool = False
    may_store: bool = False
    reply_type: str = "application/json"
    also: Mapping[str, type[msgspec.Struct]] = {}


#: A GET that asks no model.
Lookup = functools.partial(Operation, method="GET", uses_model=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One API that clients speak."""

    name: str
    operations: tuple[Operation, ...]
    #: The envelope's type, for the OpenAPI document.
    error_type: type[msgspec.Struct]
    #: The envelope as a JSON body.
    error_body: Envelope
    #: The bytes that tell the error and end a stream that had begun.
    error_events: Envelope
    #: What its streams are.
    stream_type: str = "text/event-stream"
    #: Keeps a stream alive while the model is not here yet.
    comment: Callable[[str], bytes] = sse_comment
    #: Whether a body's declared type must be JSON. Ollama never looked, so its users send none.
    checks_body_type: bool = True
    #: Whether a lone model answers to any name. Ollama's clients pull a model that is not found.
    answers_any_name: bool = True
    #: Paths that begin so and are nobody's are refused in this dialect.
    prefix: str = ""
