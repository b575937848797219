"""Find out which user is at the other end of a local TCP connection, or listens on a port.

For one connection, the kernel answers by netlink (sock_diag(7)) in 40 µs. If netlink is forbidden, the
tables in /proc/net are read, which takes 3.5 ms.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF
_INET_DIAG_SHUTDOWN = 8
_SEND_SHUTDOWN = 2
_LISTEN = "0A"
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in /proc/net/tcp6
_HEADER = struct.Struct("=IHHII")
_MESSAGE_BYTES = 72
_UID_AND_INODE = struct.Struct("=II")


#: Netlink socket for all look-ups; if None, each look-up opens a new one.
_kernel: socket.socket | None = None


def use_netlink_socket(kernel: socket.socket) -> None:
    """Use the netlink socket `kernel` for later look-ups of connections' and listeners' users.

    A resumed process needs a socket that the launcher has created: the kernel reports user ids as in
    the user namespace of the socket's creator. In that of the process, every other user is 65534.
    """
    global _kernel
    _kernel = kernel


class Peer(NamedTuple):
    """The user at the other end. `is_half_closed`: that end will send nothing more, but still reads."""

    uid: int
    is_half_closed: bool = False


def peer_of(connection: socket.socket) -> Peer | None:
    """Return the peer of a TCP connection; None if it is on another machine or has disconnected."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        local, remote = connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # the client has disconnected
        return None
    try:
        return _ask_kernel(connection.family, local, remote)
    except OSError:  # a seccomp filter, gVisor, or a kernel without inet_diag forbids netlink
        ends = _spell(*remote), _spell(*local)
        uids = [row.uid for row in _rows() if (row.local, row.remote) == ends and row.inode]
        return Peer(uids[0]) if uids else None


def listener_uids(port: int) -> set[int]:
    """Return the ids of the users who listen on a port, on any address of this machine."""
    suffix = f":{port:04X}"
    return {row.uid for row in _rows() if row.state == _LISTEN and row.local.endswith(suffix)}


def _ask_kernel(family: int, local: tuple[str, int], remote: tuple[str, int]) -> Peer | None:
    ports = struct.pack(">HH", remote[1], local[1])
    packed = (socket.inet_pton(family, address) for address, _ in (remote, local))
    addresses = b"".join(address.ljust(16, b"\0") for address in packed)
    request = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, _ANY) + ports + addresses
    request += struct.pack("=III", 0, _ANY, _ANY)
    head = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    kernel = _kernel or socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG)
    try:
        kernel.send(head + request)
        answer = kernel.recv(4096)
    finally:
        if kernel is not _kernel:
            kernel.close()
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, "the kernel refused to look up a TCP connection")
    uid, inode = _UID_AND_INODE.unpack_from(answer, _HEADER.size + _MESSAGE_BYTES - _UID_AND_INODE.size)
    # a socket without an inode is closed, and its user id is meaningless
    return Peer(uid, _shutdown(answer) == _SEND_SHUTDOWN) if inode else None


def _shutdown(answer: bytes) -> int:
    """Return which directions the peer has closed: the kernel's `sk_shutdown` bits, 0 for none."""
    offset = _HEADER.size + _MESSAGE_BYTES
    while offset + 4 < len(answer):
        length, kind = struct.unpack_from("=HH", answer, offset)
        if kind == _INET_DIAG_SHUTDOWN:
            return answer[offset + 4]
        offset += max(4, (length + 3) & ~3)
    return 0


class _Row(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: int


def _rows() -> Iterator[_Row]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                ends = local.removeprefix(_MAPPED), remote.removeprefix(_MAPPED)
                yield _Row(*ends, state, int(uid), int(inode))


def _spell(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    raw = socket.inet_pton(family, address.partition("%")[0])
    numbers = struct.unpack(f"={len(raw) // 4}I", raw)
    return f"{''.join(f'{word:08X}' for word in numbers)}:{port:04X}".removeprefix(_MAPPED)
