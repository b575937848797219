"""Messages between the launcher, its apps and the builders of snapshots, sent over Unix sockets.

Each kind of message is a class. On the wire, a message is its length (4 bytes, little-endian), then the
class's name, then name and value of each field; 4 bytes of length precede each of these strings, too.
Descriptors are sent with the first byte (SCM_RIGHTS).

The format is our own because importing `json` or `dataclasses` would cost the launcher 6 ms each, and
because arguments, environments and paths are bytes anyway.
"""

from __future__ import annotations

import _socket  # importing `socket` takes 10 ms
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[type], type]:
        return lambda cls: cls


#: Resource limits that an app adopts from its launcher: only the soft limits, since only root may raise
#: hard ones.
LIMITS = tuple(f"RLIMIT_{name}" for name in "NOFILE CORE CPU FSIZE DATA AS STACK".split())
MAX_BYTES = 16 << 20
MAX_FDS = 64
_FD_BYTES = 4
_kinds: dict[str, type[LauncherMessage]] = {}


@dataclass_transform(kw_only_default=True)
class LauncherMessage:
    """Base of all messages. Each annotation of a subclass is a field, and a keyword argument."""

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(self) == encode(other)

    __hash__ = None  # type: ignore[assignment]


class LaunchRequest(LauncherMessage):
    """Launcher to app: the role to run in, the process environment to adopt, and how the app started.

    `role` is "verb" (run `argv`), "worker" (serve an engine for `model` with `options`, LoadOptions in
    JSON), "canary" (compute the canary) or "facts" (report the state of the process). The descriptors
    are 0, 1 and 2; for a verb also its listening sockets and a netlink socket, for a worker the socket
    to its client. `exec_ns` is when the launcher was executed, `main_ns` when its `main` began,
    `spawn_ns` when it started the app (monotonic). `hint` says how to avoid a cold start.
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
    """App to launcher: start a process that serves an engine for `model` with `options`.

    `options` is LoadOptions in JSON. `requested` has, as text, the options that select a snapshot.
    """

    model: str
    options: bytes
    requested: dict[str, str]


class WorkerStarted(LauncherMessage):
    """Launcher to app: the worker has been started; the descriptor is the socket to the worker."""


class WantSnapshot(LauncherMessage):
    """App to launcher: build a snapshot of `model` with `options` (LoadOptions in JSON).

    The build starts when the app has ended, or at once if `now`.
    """

    model: str
    options: bytes
    now: bool = False


class WarmNow(LauncherMessage):
    """App to launcher: run `edgeinfer warm` with `argv`; the descriptor gets its output."""

    argv: tuple[str, ...]


class StopWarming(LauncherMessage):
    """App to launcher: stop the `edgeinfer warm` that `WarmNow` started."""


class TakeSnapshot(LauncherMessage):
    """App to launcher: run `edgeinfer snapshots take` with `argv`; the descriptor gets its JSON."""

    argv: tuple[str, ...]


class Exit(LauncherMessage):
    """App to launcher: the verb has ended with this exit code."""

    code: int


class Stage(LauncherMessage):
    """Builder to its client: this `fraction` of the stage `name` is done ("0.2500"; "" if unknown)."""

    name: str
    fraction: str


class Failed(LauncherMessage):
    """The answer to a request that has failed. `error` is the result of `errors.to_fields`."""

    error: dict[str, str]


class Payload(LauncherMessage):
    """A request or an answer as JSON (a canary as msgpack). The receiver knows which type to expect."""

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
            raise ValueError("a field is longer than its message")
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
    """Return a message's bytes, without the leading 4 bytes of length."""
    kind = type(message)
    parts = [kind.__name__.encode()]
    for name in kind.__annotations__:
        parts += (name.encode(), _raw(getattr(message, name)))
    return _pack(parts)


def decode(body: bytes) -> LauncherMessage:
    """Return the message in `body`. Raises ValueError if it is invalid."""
    kind, *parts = _unpack(body) or [b""]
    cls = _kinds.get(kind.decode())
    if cls is None:
        raise ValueError(f"unknown kind of message: {kind!r}")
    types = cls.__annotations__
    fields: dict[str, object] = {}
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        if name.decode() not in types:
            raise ValueError(f"the message {kind!r} has no field {name!r}")
        fields[name.decode()] = _READERS[types[name.decode()]](value)
    return cls(**fields)


def send(link: _socket.socket, message: LauncherMessage, fds: Iterable[int] = ()) -> None:
    """Send a message and descriptors; wait until all are sent. Raises OSError if the peer has ended."""
    body = encode(message)
    data = memoryview(len(body).to_bytes(4, "little") + body)
    numbers = b"".join(fd.to_bytes(_FD_BYTES, "little") for fd in fds)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if numbers else []
    sent = link.sendmsg([data], rights)
    if sent < len(data):
        link.sendall(data[sent:])


def receive(link: _socket.socket) -> tuple[LauncherMessage, list[int]] | None:
    """Wait for a message; return the message and its descriptors, or None if the peer has ended."""
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
    """Read `size` bytes, or fewer at the end of the stream; append descriptors to `fds`."""
    parts: list[bytes] = []
    while size:
        received, control, _flags, _address = link.recvmsg(
            size, _socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _FD_BYTES
                numbers = (data[offset : offset + _FD_BYTES] for offset in range(0, whole, _FD_BYTES))
                fds += [int.from_bytes(number, "little") for number in numbers]
        if not received:
            break
        parts.append(received)
        size -= len(received)
    return b"".join(parts)
