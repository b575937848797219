"""What a client is told when this process is killed under its request, decided before it happens.

Whoever outlives this process keeps copies of connections and writes `replies` on them
(`snapshots.launching.kept_connections`): a whole 503 where nothing was answered yet, an error event and
the end of the stream where one had begun, nothing where a request is not being answered. Connections
under TLS have keys that only this process knows: they are only cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.server.core.connection import Connection
from edgeinfer.server.core.dialect import Dialect
from edgeinfer.server.core.exchange import Exchange
from edgeinfer.server.core.problems import Problem, unavailable

#: The state of a connection with nothing to answer, or an answer that cannot be ended properly: it is
#: closed without a word. After it come two states a dialect: waiting for an answer, and in a stream.
SILENT = 0
_STREAMS = (b"text/event-stream", b"application/x-ndjson")


def waiting_state(place: int) -> int:
    """The state in which the dialect at `place` owes a whole answer."""
    return 1 + 2 * place


def stream_state(place: int) -> int:
    """The state in which the dialect at `place` is in the middle of a stream."""
    return 2 + 2 * place


def replies(dialects: Sequence[Dialect]) -> list[bytes]:
    """The bytes for every state, in order."""
    said = "The endpoint was stopped while it worked on this request; ask again."
    problem = unavailable(said, "endpoint_stopped", 1)
    found = [b""]
    for dialect in dialects:
        found.append(_whole(problem, dialect.error_body(problem, "")))
        found.append(_chunks(dialect.error_events(problem, "")))
    return found


def _whole(problem: Problem, body: bytes) -> bytes:
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    } | problem.headers
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {problem.status} Service Unavailable\r\n{head}\r\n".encode() + body


def _chunks(events: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


class CrashReplyMiddleware:
    """Note how far the answer is, where a request uses a model and somebody outlives this process."""

    def __init__(self, app: ASGIApp, dialects: Sequence[Dialect]) -> None:
        self._app = app
        self._places = {dialect: place for place, dialect in enumerate(dialects)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["edgeinfer"]
        connection: Connection | None = scope.get("connection")
        if connection is None or not exchange.uses_model:
            await self._app(scope, receive, send)
            return
        place = self._places[exchange.dialect]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                connection.mark(stream_state(place) if _is_stream(message) else SILENT)
                return
            if not message.get("more_body"):
                connection.mark(SILENT)
            await send(message)

        connection.mark(waiting_state(place))
        try:
            await self._app(scope, receive, sending)
        finally:
            connection.mark(SILENT)


def _is_stream(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(_STREAMS) for name, value in start["headers"]
    )
