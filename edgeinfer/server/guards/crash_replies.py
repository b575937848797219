"""What a client is told when this process is killed under its request, decided before it happens.

Whoever outlives this process keeps copies of connections and writes `replies` on them
(`snapshots.launching.kept_connections`): a whole 503 where nothing was answered yet, an error event and
the end of the stream where one had begun, nothing where a request is not being answered. Connections
under TLS have keys that only this process knows: they are only cut.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

import msgspec
from starlette.types import Message, Send

from edgeinfer.server.core.problems import Dialect, Problem
from edgeinfer.server.guards.connection import Connection


class State(enum.IntEnum):
    """What a connection is in the middle of."""

    SILENT = 0  # nothing, or an answer that cannot be ended properly: closed without a word
    WAITING = enum.auto()
    WAITING_ANTHROPIC = enum.auto()
    STREAM = enum.auto()
    STREAM_RESPONSES = enum.auto()
    STREAM_ANTHROPIC = enum.auto()


def replies() -> list[bytes]:
    """The bytes for every state, in order."""
    problem = Problem(
        503,
        "The endpoint was stopped while it worked on this request; ask again.",
        kind="server_error",
        code="endpoint_stopped",
        retry_after_s=1,
    )
    openai, anthropic = problem.body("openai", ""), problem.body("anthropic", "")
    of_responses = msgspec.json.encode(
        {
            "type": "error",
            "code": problem.code,
            "message": problem.message,
            "param": None,
            "sequence_number": 0,
        }
    )
    return [
        b"",
        _whole(problem, openai),
        _whole(problem, anthropic),
        _chunks(b"data: %b\n\ndata: [DONE]\n\n" % openai),
        _chunks(b"event: error\ndata: %b\n\n" % of_responses),
        _chunks(b"event: error\ndata: %b\n\n" % anthropic),
    ]


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


@contextlib.contextmanager
def noting(connection: Connection, route: str, dialect: Dialect, send: Send) -> Iterator[Send]:
    """Gives the `send` of one request, which notes how far its answer is."""
    anthropic = dialect == "anthropic"

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            connection.mark(_streaming(route, anthropic) if _is_stream(message) else State.SILENT)
            return
        if not message.get("more_body"):
            connection.mark(State.SILENT)
        await send(message)

    connection.mark(State.WAITING_ANTHROPIC if anthropic else State.WAITING)
    try:
        yield sending
    finally:
        connection.mark(State.SILENT)


def _is_stream(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


def _streaming(route: str, anthropic: bool) -> State:
    if anthropic:
        return State.STREAM_ANTHROPIC
    return State.STREAM_RESPONSES if route == "/v1/responses" else State.STREAM
