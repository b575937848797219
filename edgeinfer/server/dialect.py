"""Base classes of the dialects. A dialect is an HTTP API: OpenAI's, Anthropic's, Ollama's or our own.

Each dialect is a folder next to this file. `wire.py` declares the dialect's JSON types. The module of a
route that generates (`chat.py`, `messages.py`, `responses.py`) has the handler, the conversion of
requests, and the `Renderer` that converts the engine's events. `routes.py` has the other routes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_type_hints

import msgspec
from starlette.responses import Response

from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, Timings, Usage
from edgeinfer.server.problems import Problem
from edgeinfer.server.wire_types import WireTimings


def sse_comment(text: str) -> bytes:
    """Encode an SSE comment. Clients skip comments, which show that the server is alive."""
    return f": {text}\n\n".encode()


_encode = msgspec.json.Encoder().encode


def sse(data: Any, event: str = "") -> bytes:
    """Encode a server-sent event with `data` as JSON, and an `event:` line unless `event` is ""."""
    name = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (name, _encode(data))


def stamp(unix_s: float) -> str:
    """Format a Unix time as ISO 8601 in UTC: 2026-11-29T13:05:00.5Z."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


Method = Literal["GET", "POST", "DELETE"]
#: Function called with `context` and, if it has these parameters, the decoded `body` and `query`. It
#: returns a Response, or a value to send as JSON.
Handler = Callable[..., Awaitable[Any]]
#: Function that encodes a problem as an error of the dialect. Its second argument is the request's id.
ErrorEncoder = Callable[[Problem, str], bytes]


#: Maximum body (bytes) of a route that needs no API key.
_OPEN_BODY_BYTES = 8 << 10


class Operation(msgspec.Struct, frozen=True):
    """One HTTP method at one path, with its handler and its JSON types.

    `reply`, `body` and `query` are None if the handler declares no type for them. `takes` names the
    handler's parameters: "body", "query", both or none.
    """

    path: str
    handler: Handler
    summary: str
    method: Method
    #: JSON types of the response, of the request's body and of its query.
    reply: Any = None
    body: Any = None
    query: Any = None
    takes: tuple[str, ...] = ()
    streams: bool = False
    #: Whether a request counts towards `max_requests`, and is refused while the endpoint drains.
    uses_model: bool = True
    is_admin: bool = False
    #: Access: "" with an API key; on routes of the web page "cookie" after a sign-in, "open" to all.
    web: Literal["", "open", "cookie"] = ""
    #: Maximum body (bytes); 0 means `Limits.max_body_bytes`.
    max_body_bytes: int = 0
    reply_type: str = "application/json"
    #: Additional HTTP status of this route → type of the response's body, for the OpenAPI document.
    also: Mapping[str, type[msgspec.Struct]] = {}

    @property
    def generates(self) -> bool:
        """Return whether the operation generates text."""
        return (self.streams and not self.is_admin) or self.path == "/infer"


class RouteTable(list[Operation]):
    """A module's operations. Decorating a handler with `get`, `post` or `delete` adds an operation.

    Requests are decoded as the types of a handler's parameters `body` and `query`. The OpenAPI document
    contains these types, the handler's return type, and the first line of its docstring as the summary.
    """

    def add(self, method: Method, path: str, **declared: Any) -> Callable[[Handler], Handler]:
        """Register the decorated handler at a path; `declared` are further fields of `Operation`."""

        def register(handler: Handler) -> Handler:
            summary = (handler.__doc__ or "").partition("\n")[0]
            types = get_type_hints(handler)
            takes: dict[str, Any] = {name: types[name] for name in ("body", "query") if name in types}
            reply = {} if types["return"] is Response else {"reply": types["return"]}
            fields: dict[str, Any] = {**takes, **reply, **declared, "takes": tuple(takes)}
            if declared.get("web") == "open":
                fields.setdefault("max_body_bytes", _OPEN_BODY_BYTES)
            self.append(Operation(path, handler, summary, method, **fields))
            return handler

        return register

    def get(
        self, path: str, *, uses_model: bool = False, **declared: Any
    ) -> Callable[[Handler], Handler]:
        return self.add("GET", path, uses_model=uses_model, **declared)

    def post(self, path: str, **declared: Any) -> Callable[[Handler], Handler]:
        return self.add("POST", path, **declared)

    def delete(self, path: str, **declared: Any) -> Callable[[Handler], Handler]:
        return self.add("DELETE", path, uses_model=False, **declared)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """An HTTP API, such as OpenAI's or Ollama's: operations, and the formats of errors and streams."""

    name: str
    operations: Sequence[Operation]
    #: Type of an error's JSON body, for the OpenAPI document.
    error_type: type[msgspec.Struct]
    error_body: ErrorEncoder
    #: Encodes an error as the last event of a stream.
    error_events: ErrorEncoder
    stream_type: str = "text/event-stream"
    #: Encodes a keep-alive comment, which is sent while the model is being loaded.
    comment: Callable[[str], bytes] = sse_comment
    #: Whether the header Content-Type must say JSON. Ollama does not check it, so clients leave it out.
    checks_body_type: bool = True
    #: Unknown paths with this prefix get this dialect's errors.
    prefix: str = ""


class Renderer(ABC):
    """Converts the engine's events to the response of a route.

    A stream consists of `opening`, the result of `event` for each event, and `closing`. `whole` renders
    a response that is not streamed.
    """

    def opening(self) -> bytes:
        """Return the first bytes of the stream, sent when the engine has accepted the request."""
        return b""

    def event(self, index: int, event: Event) -> bytes:
        """Render an event of generation `index`; b"" for an event that this API does not send."""
        return b""

    def closing(self) -> bytes:
        """Return the last bytes of the stream, sent when every generation has ended."""
        return b""

    def failure(self, problem: Problem) -> bytes:
        """Return the last bytes of a stream that fails with `problem`.

        If the result is b"", the dialect's `error_events` makes these bytes.
        """
        return b""

    def waiting(self, text: str) -> bytes:
        """Return bytes to send in a pause of the stream, so that the client does not time out.

        By default these bytes are the comment `text`. Most renderers add an event without text, because
        some clients time out on a stream without events, and do not count comments as events.
        """
        return sse_comment(text)

    @abstractmethod
    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        """Render a response that is not streamed."""


def wire_timings(usage: Usage, timings: Timings) -> WireTimings:
    """Make the field `timings` of a response, as in llama.cpp's server."""
    prefilled = max(0, usage.prompt_tokens - usage.cached_tokens)
    generated, prefill_ms = usage.completion_tokens, timings.prefill_ms
    return WireTimings(
        queue_ms=round(timings.queue_ms, 3),
        ttft_ms=round(timings.ttft_ms, 3),
        cache_n=usage.cached_tokens,
        cache_disk_n=usage.cached_disk_tokens,
        prompt_n=prefilled,
        prompt_ms=round(prefill_ms, 3),
        prompt_per_token_ms=round(prefill_ms / prefilled, 3) if prefilled else 0.0,
        prompt_per_second=round(prefilled * 1000 / prefill_ms, 2) if prefill_ms else 0.0,
        predicted_n=generated,
        predicted_ms=round(timings.decode_ms, 3),
        predicted_per_token_ms=round(timings.decode_ms / (generated - 1), 3) if generated > 1 else 0.0,
        predicted_per_second=round(timings.decode_tokens_per_s(generated), 2),
        constraint_ms=round(timings.constraint_ms, 3),
        draft_n=timings.draft_tokens,
        draft_n_accepted=timings.draft_accepted_tokens,
        saved_ms=round(timings.saved_ms, 3),
    )
