"""uvicorn's HTTP/1.1 protocol with the guards that it leaves to a proxy.

uvicorn (httptools) limits neither header bytes nor the time a client takes to send them, nor the time
it takes to read an answer. Here a header block, a body and a full write buffer each have a deadline,
and headers have a number and a size.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edgeinfer.host import Copies
from edgeinfer.server.core.connection import Connection
from edgeinfer.server.core.limits import Limits

_REFUSALS = {
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def guarded(limits: Limits, copies_kept: Copies | None = None) -> type[HttpToolsProtocol]:
    """Make the protocol class that enforces `limits`, one instance a connection."""

    class Guarded(_Guarded):
        guard = limits
        copies = copies_kept

    return Guarded


class _Guarded(HttpToolsProtocol):
    guard: Limits
    copies: Copies | None
    connection: Connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = False
        self._refused = False

    # --- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection = Connection(self.copies, transport)
        if len(self.connections) > self.guard.max_connections:
            self._refuse(503)
        else:
            self._arm(self.guard.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self.connection.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._arm(self.guard.header_s)
        self._header_bytes += len(data)
        super().data_received(data)
        if (
            self._in_headers
            and self._header_bytes > self.guard.max_header_bytes + self.guard.max_url_bytes
        ):
            self._refuse(431)  # the parser holds an unfinished header back without a limit of its own

    # --- parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self.connection  # type: ignore[typeddict-unknown-key]
        self._header_bytes = 0
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.guard.max_url_bytes:
            self._refuse(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.guard.max_headers:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if sum(len(name) + len(value) for name, value in self.headers) > self.guard.max_header_bytes:
            self._refuse(431)
        if self._refused:
            return
        self._disarm()
        self._arm(self.guard.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        if not self._refused:
            super().on_message_complete()

    # --- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.guard.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- deadlines

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """The client did not finish its headers or its body in time."""
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answer without the application, and close: a request begun sees a disconnect."""
        if self._refused:
            return
        self._refused = True
        self._disarm()
        reason = _REFUSALS[status]
        head = b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, reason)
        self.transport.write(head)
        self.transport.close()
