"""Messages between launcher and apps: named byte strings, descriptors, over a socket.

A message is four bytes of length, then for every field four bytes of length, its name, four bytes of
length, its value. Descriptors ride with a message's first byte. No JSON: importing it costs the
launcher 6 ms, and arguments, environments and paths are bytes anyway. Several strings in one field are
joined by NUL, as in /proc/PID/environ; none can contain one.

Only what comes with the interpreter for nothing is imported here.
"""

from __future__ import annotations

import _socket  # the C part: `socket` itself costs 10 ms
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Value = bytes | str | int | float

MAX_BYTES = 16 << 20
MAX_FDS = 64
_FD_BYTES = 4


def pack(fields: Mapping[str, Value]) -> bytes:
    """The message's bytes, its length in front."""
    parts: list[bytes] = []
    for name, value in fields.items():
        raw = value if isinstance(value, bytes) else os.fsencode(str(value))
        for part in (name.encode(), raw):
            parts += (len(part).to_bytes(4, "little"), part)
    body = b"".join(parts)
    return len(body).to_bytes(4, "little") + body


def unpack(body: bytes) -> dict[str, bytes]:
    """The fields of a message without its own length. Raises ValueError when the lengths do not fit."""
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "little")
        at += 4
        if at + size > len(body):
            raise ValueError("a field is longer than its message")
        parts.append(body[at : at + size])
        at += size
    if len(parts) % 2:
        raise ValueError("a field has no value")
    return {name.decode(): value for name, value in zip(parts[::2], parts[1::2], strict=True)}


def join(strings: Iterable[str]) -> bytes:
    """Several strings as one value."""
    return b"\0".join(os.fsencode(s) for s in strings)


def split(value: bytes) -> list[str]:
    """Split a value made by `join`; an empty one has no strings, so [""] does not survive."""
    return [os.fsdecode(part) for part in value.split(b"\0")] if value else []


def send(link: _socket.socket, fields: Mapping[str, Value], fds: Iterable[int] = ()) -> None:
    """Send one message whole. Raises OSError when the other side is gone."""
    data = memoryview(pack(fields))
    numbers = b"".join(fd.to_bytes(_FD_BYTES, "little") for fd in fds)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if numbers else []
    sent = link.sendmsg([data], rights)
    if sent < len(data):
        link.sendall(data[sent:])


def receive(link: _socket.socket) -> tuple[dict[str, bytes], list[int]] | None:
    """Wait for one message and its descriptors; None when the other side is gone."""
    fds: list[int] = []
    try:
        head = _exactly(link, 4, fds)
        size = int.from_bytes(head, "little")
        if len(head) < 4 or size > MAX_BYTES:
            return None
        body = _exactly(link, size, fds)
    except ConnectionError:
        return None
    return (unpack(body), fds) if len(body) == size else None


def _exactly(link: _socket.socket, size: int, fds: list[int]) -> bytes:
    """Read `size` bytes, fewer at the end of the stream; add descriptors, close-on-exec, to `fds`."""
    parts: list[bytes] = []
    while size:
        part, control, _flags, _address = link.recvmsg(
            size, _socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _FD_BYTES
                fds += [
                    int.from_bytes(data[i : i + _FD_BYTES], "little")
                    for i in range(0, whole, _FD_BYTES)
                ]
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
