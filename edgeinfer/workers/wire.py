"""What a worker and its client say to each other: typed frames over one unix stream socket.

A message is four bytes of length and one msgpack frame. A generation's events come back as they are
made; the other calls answer once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import msgspec

from edgeinfer.host import Start
from edgeinfer.runtime.events import Event
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest

MAX_BYTES = 1 << 30


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Anything on the wire."""


class Submit(Frame, frozen=True):
    id: int
    request: GenerateRequest


class Cancel(Frame, frozen=True):
    id: int


class Call(Frame, frozen=True):
    id: int
    method: str
    arguments: msgspec.Raw


class Problem(Frame, frozen=True):
    """An error of ours, as `errors.to_fields` has it. `id` 0: the engine did not come to be."""

    id: int
    error: dict[str, str]


class Loading(Frame, frozen=True):
    stage: str
    fraction: float | None


class Ready(Frame, frozen=True):
    info: EngineInfo
    start: Start


class Accepted(Frame, frozen=True):
    id: int


class Item(Frame, frozen=True):
    id: int
    event: Event


class Answer(Frame, frozen=True):
    id: int
    value: msgspec.Raw


ToWorker = Submit | Cancel | Call
FromWorker = Problem | Loading | Ready | Accepted | Item | Answer


class Wire:
    """Whole frames over a stream socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Raises OSError when the other side is gone."""
        with self._sending:
            body = self._encoder.encode(frame)
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        """The next frame, or None at the end."""
        try:
            head = self._file.read(4)
            size = int.from_bytes(head, "little")
            body = self._file.read(size) if len(head) == 4 and size <= MAX_BYTES else b""
        except OSError:
            return None
        return decoder.decode(body) if body and len(body) == size else None

    def finish(self) -> None:
        """Say that nothing more is asked. What the other side still sends is received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """From any thread: the side that receives, here and there, comes to the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the side that receives, when it has come to the end."""
        self.hang_up()
        self._file.close()
        self._sock.close()
