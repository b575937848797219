"""Messages between launcher, apps and builders: a class each, sent with descriptors over a socket.

A message is its length in four bytes, then a list of parts: the name of its class, then name and value
of every field. In a list, each part follows its length in four bytes; a field with several strings is
such a list too. Descriptors are sent with a message's first byte.

JSON and dataclasses would cost the launcher 6 ms each to import, and arguments, environments and paths
are bytes anyway. Only modules that the interpreter has already loaded are imported here.
"""

from __future__ import annotations

import _socket  # the C module: `socket` itself costs 10 ms
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[type], type]:
        return lambda cls: cls


MAX_BYTES = 16 << 20
MAX_FDS = 64
_FD_BYTES = 4
_kinds: dict[str, type[LauncherMessage]] = {}


@dataclass_transform(kw_only_default=True)
class LauncherMessage:
    """A message. Its fields are the annotations of its class, passed by name."""

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(self) == encode(other)

    __hash__ = None  # type: ignore[assignment]


class LaunchRequest(LauncherMessage):
    """To an app: what to run, for which user, and the course of this launch so far.

    `role` is "verb" (of `argv`), "worker" (of `model` with `options`, LoadOptions in JSON), "canary" or
    "facts". The descriptors are 0, 1, 2, then a verb's listening sockets and a netlink socket, or a
    worker's socket. Times are in ns of the monotonic clock.
    """

    role: str
    argv: tuple[str, ...] = ()
    model: str = ""
    options: bytes = b""
    env: tuple[str, ...] = ()
    cwd: str = "/"
    umask: int = 0o077
    affinity: tuple[str, ...] = ()
    limits: dict[str, str] = {}  # noqa: RUF012  never changed
    entropy: bytes = b""
    exec_ns: int = 0
    main_ns: int = 0
    spawn_ns: int = 0
    how: str = "cold"
    snapshot: str = ""
    reason: str = ""
    hint: str = ""
    expected_model: str = ""
    is_named: bool = False


class StartWorker(LauncherMessage):
    """To the launcher: start a process that serves an engine; `requested` are its snapshot options."""

    model: str
    options: bytes
    requested: dict[str, str]


class WorkerStarted(LauncherMessage):
    """To the app that requested a worker: its socket is the descriptor."""


class WantSnapshot(LauncherMessage):
    """To the launcher: the snapshot that would have helped; it is built at the end, or `now`."""

    model: str
    options: bytes
    now: bool = False


class WarmNow(LauncherMessage):
    """To the launcher: run `edgeinfer warm` with its output on the descriptor."""

    argv: tuple[str, ...]


class StopWarming(LauncherMessage):
    """To the launcher: stop the `warm` that `WarmNow` started."""


class TakeSnapshot(LauncherMessage):
    """To the launcher: run `edgeinfer snapshots take` with its JSON on the descriptor."""

    argv: tuple[str, ...]


class Exit(LauncherMessage):
    """To the launcher: the verb has ended."""

    code: int


class Stage(LauncherMessage):
    """Progress of a build: `fraction` of the stage is done, a decimal from 0 to 1, "" if unknown."""

    name: str
    fraction: str


class Failed(LauncherMessage):
    """An error with the fields of `errors.to_fields`."""

    error: dict[str, str]


class Payload(LauncherMessage):
    """A request or an answer in JSON (a canary's in msgpack); the receiver knows its type."""

    content: bytes


def _pack(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(field).to_bytes(4, "little") + field for field in parts)


def _unpack(body: bytes) -> list[bytes]:
    parts: list[bytes] = []
    offset = 0
    while offset < len(body):
        size = int.from_bytes(body[offset : offset + 4], "little")
        offset += 4
        if offset + size > len(body):
            raise ValueError("a part is longer than its message")
        parts.append(body[offset : offset + size])
        offset += size
    return parts


def _raw(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return _pack(os.fsencode(word) for item in value.items() for word in item)
    if isinstance(value, tuple):
        return _pack(map(os.fsencode, value))
    return os.fsencode(str(value))


def _tuple(raw: bytes) -> tuple[str, ...]:
    return tuple(os.fsdecode(field) for field in _unpack(raw))


def _dict(raw: bytes) -> dict[str, str]:
    fields = _tuple(raw)
    return dict(zip(fields[::2], fields[1::2], strict=True))


_READERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "str": os.fsdecode,
    "int": int,
    "bool": lambda raw: raw == b"True",
    "tuple[str, ...]": _tuple,
    "dict[str, str]": _dict,
}


def encode(message: LauncherMessage) -> bytes:
    """Encode a message, without its length."""
    kind = type(message)
    parts = [kind.__name__.encode()]
    for name in kind.__annotations__:
        parts += (name.encode(), _raw(getattr(message, name)))
    return _pack(parts)


def decode(body: bytes) -> LauncherMessage:
    """Decode a message. Raises ValueError if it is invalid."""
    kind, *parts = _unpack(body) or [b""]
    cls = _kinds.get(kind.decode())
    if cls is None:
        raise ValueError(f"unknown message {kind!r}")
    types = cls.__annotations__
    fields: dict[str, object] = {}
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        if name.decode() not in types:
            raise ValueError(f"{kind!r} has no field {name!r}")
        fields[name.decode()] = _READERS[types[name.decode()]](value)
    return cls(**fields)


def send(link: _socket.socket, message: LauncherMessage, fds: Iterable[int] = ()) -> None:
    """Send one message completely. Raises OSError if the other side has ended."""
    body = encode(message)
    data = memoryview(len(body).to_bytes(4, "little") + body)
    numbers = b"".join(fd.to_bytes(_FD_BYTES, "little") for fd in fds)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if numbers else []
    sent = link.sendmsg([data], rights)
    if sent < len(data):
        link.sendall(data[sent:])


def receive(link: _socket.socket) -> tuple[LauncherMessage, list[int]] | None:
    """Wait for one message and its descriptors; return None if the other side has ended."""
    fds: list[int] = []
    try:
        head = _exactly(link, 4, fds)
        size = int.from_bytes(head, "little")
        if len(head) < 4 or size > MAX_BYTES:
            return None
        body = _exactly(link, size, fds)
    except ConnectionError:
        return None
    return (decode(body), fds) if len(body) == size else None


def _exactly(link: _socket.socket, size: int, fds: list[int]) -> bytes:
    """Read `size` bytes, fewer at the end of the stream; add close-on-exec descriptors to `fds`."""
    parts: list[bytes] = []
    while size:
        received, control, _flags, _address = link.recvmsg(
            size, _socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _FD_BYTES
                numbers = (data[at : at + _FD_BYTES] for at in range(0, whole, _FD_BYTES))
                fds += [int.from_bytes(number, "little") for number in numbers]
        if not received:
            break
        parts.append(received)
        size -= len(received)
    return b"".join(parts)
