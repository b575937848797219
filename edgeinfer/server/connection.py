"""A client's TCP or unix connection: its user, its state, and direct writes to its socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from edgeinfer.platform.tcp import peer_of
from edgeinfer.runtime.events import Event, ReasoningDelta, TextDelta

T = TypeVar("T")


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless(stop: Awaitable[object], work: Awaitable[T]) -> T | None:
    """Await `work`; if `stop` ends first, cancel `work` and return None. Raises what `work` raises."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        ending.cancel()


class Connection:
    """One client's connection. Use it only on the event loop's thread."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._descriptor: int = self._socket.fileno()
        self._is_lost = False
        #: Whether answers use chunked encoding; HTTP/1.0 ends an answer by closing the connection.
        self.is_chunked = True
        self._direct_writer: DirectWriter | None = None

    @property
    def is_unix(self) -> bool:
        """Return whether this is a unix socket. Its file's mode decides which users may connect."""
        return bool(self._socket.family == socket.AF_UNIX)

    @functools.cached_property
    def uid(self) -> int | None:
        """Return the client's uid; None if it runs on another machine or has disconnected."""
        peer = peer_of(self._socket)
        return None if peer is None else peer.uid

    def is_half_closed(self) -> bool:
        """Return whether the client has called shutdown(SHUT_WR) but still reads; False with TLS."""
        peer = None if self._is_tls else peer_of(self._socket)
        return peer is not None and peer.is_half_closed

    def open_direct_writer(self, render: Callable[[Event], bytes]) -> DirectWriter | None:
        """Return a writer that encodes events by `render` and writes them on the decode thread.

        Return None if the connection uses TLS or HTTP/1.0, is closing, or still has bytes to send.
        """
        if self._is_tls or self._is_lost or not self.is_chunked:
            return None
        if self._transport.get_write_buffer_size():
            return None
        self._direct_writer = DirectWriter(self._descriptor, self._transport, render)
        return self._direct_writer

    def stop_direct_writes(self) -> None:
        """Stop direct writes for good, because the event loop is about to close the socket."""
        self._is_lost = True
        if self._direct_writer is not None:
            self._direct_writer.close()


class DirectWriter:
    """Writes the tokens of a stream to the socket on the decode thread, without waking the event loop.

    The writer is passed to `Generation.tap`, and is then called with each event. While the writer is
    open, the event loop writes nothing to this connection. If a token does not fit into the socket's
    buffer, the writer closes, and the event loop writes the rest.
    """

    def __init__(
        self, descriptor: int, transport: asyncio.WriteTransport, render: Callable[[Event], bytes]
    ) -> None:
        self._descriptor = descriptor
        self._transport = transport
        self._render = render
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_open = True

    def __call__(self, event: Event) -> bool:
        """Send an event's token; return False if the event loop must send the event."""
        if not isinstance(event, TextDelta | ReasoningDelta):
            return False
        with self._lock:  # makes `close` wait: afterwards another client may get this descriptor
            if not self._is_open:
                return False
            try:
                data = self._render(event)
            except Exception:  # noqa: BLE001  it must not end the decode thread: the event loop renders the event again and reports the error
                self._is_open = False
                return False
            chunk = b"%x\r\n%b\r\n" % (len(data), data)
            try:
                written = os.write(self._descriptor, chunk)
            except BlockingIOError:
                written = 0
            except OSError:  # abort: asyncio does not notice that a half-closed connection has ended
                self._is_open = False
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._transport.abort)
                return True
            if written < len(chunk):
                self._is_open = False
                with contextlib.suppress(RuntimeError):  # the event loop is already closed
                    self._loop.call_soon_threadsafe(self._transport.write, chunk[written:])
            return True

    def close(self) -> None:
        """Stop writing, so that the event loop sends all later tokens. Idempotent."""
        with self._lock:
            self._is_open = False
