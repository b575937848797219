"""uvicorn's HTTP/1.1 protocol with limits, which uvicorn expects a reverse proxy to enforce.

Deadlines: for receiving all headers, for receiving the body, and for a client that does not read its
response. Sizes: number and bytes of headers, trailers and chunk extensions, and length of the URL.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edgeinfer.server.connection import Connection
from edgeinfer.server.limits import Limits

#: How long (s) a client may keep sending its body after the response. If the server closed the socket
#: at once, the kernel would reset the connection and the client might lose the response.
_LINGER_S = 2.0
#: Interval (s) of the checks whether a client that sends nothing more (a half-closed connection) has
#: also stopped reading. asyncio does not notice that.
_WATCH_S = 1.0


class _UnknownLength(int):
    """A Content-Length that fits any body, for HTTP/1.0, where closing the connection ends a body."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UnknownLength:
        return self

    __hash__ = int.__hash__


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which enforces the endpoint's `Limits`."""

    connection: Connection

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        self._in_headers = False
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection = Connection(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503)
        else:
            self._start_deadline(self.limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self.resume_writing()
        self.connection.stop_direct_writes()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_deadline(self.limits.header_s)
        self._held_bytes += len(data)
        super().data_received(data)
        url_bytes = self.limits.max_url_bytes if self._in_headers else 0
        if self._held_bytes > self.limits.max_header_bytes + url_bytes:
            self._refuse(431)  # the parser would buffer unfinished headers and trailers without a limit

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Return True (keep the connection) if a response is unfinished and the client still reads."""
        cycle = self.cycle
        is_answering = cycle is not None and not (cycle.response_complete or cycle.more_body)
        if not is_answering or not self.connection.is_half_closed():
            return None
        cycle.keep_alive = False
        self._watch_client()
        return True

    def _watch_client(self) -> None:
        """Abort a half-closed connection when its client disconnects, which asyncio does not notice."""
        if self.transport.is_closing():
            return
        if self.connection.is_half_closed():
            self.loop.call_later(_WATCH_S, self._watch_client)
        else:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self.connection  # type: ignore[typeddict-unknown-key]
        self._held_bytes = 0
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_url_bytes:
            self._refuse(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # ignore this trailer; `_held_bytes` limits its size
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._held_bytes = 0
        if sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._refuse(431)
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            self._refuse(400)
        if any(n == b"transfer-encoding" and v.strip().lower() != b"chunked" for n, v in self.headers):
            self._refuse(501)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(505)
        if self._refused:
            return
        self._start_deadline(self.limits.body_s)
        self._use_host_of_target()
        super().on_headers_complete()
        self.connection.is_chunked = version == "1.1"
        if version == "1.0":  # HTTP/1.0 has no chunked encoding: the response ends with the connection
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UnknownLength()

    def _use_host_of_target(self) -> None:
        """Replace the Host header by the host of a target like `http://host/path` (RFC 9112, 3.2.2)."""
        if self.url.startswith((b"/", b"*")):
            return
        target = httptools.parse_url(self.url)
        if target.host:
            host = b"[%b]" % target.host if b":" in target.host else target.host
            host += b":%d" % target.port if target.port else b""
            self.headers[:] = [*((n, v) for n, v in self.headers if n != b"host"), (b"host", host)]

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_bytes = 0
        self._cancel_deadline()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_deadline(_LINGER_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        self._timer = self.loop.call_later(seconds, self._refuse, 408)

    def _cancel_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int) -> None:
        """Send a status without a body and close the connection, without calling the application."""
        if self._refused:
            return
        self._refused = True
        self._cancel_deadline()
        reason = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, reason)
        cycle = self.cycle
        if self.pipeline or (cycle and cycle.response_started and not cycle.response_complete):
            self.transport.abort()  # a response is being sent: another one would corrupt it
            return
        # if the response was sent before the whole body had arrived, do not send a second one
        if not (cycle and cycle.response_complete and cycle.more_body):
            self.transport.write(head)
        self.transport.close()
