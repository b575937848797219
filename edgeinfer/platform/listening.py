"""Listening sockets of the endpoint: bound by this process, or passed by systemd."""

from __future__ import annotations

import _socket
import os

from edgeinfer.errors import ServeError

#: Address of `serve` unless config.toml or the command line names another.
HOST, PORT = "127.0.0.1", 8080


def bind(host: str, port: int) -> list[int]:
    """Listen on every TCP address of `host` (IPv4, IPv6); return descriptors. Raises ServeError.

    With `port` 0, the kernel chooses a port, and only the first address is used.
    """
    listeners: list[_socket.socket] = []
    try:
        # for a str, Python would import the IDNA codec (6 ms)
        node = host.encode() if host.isascii() else host
        addresses = _socket.getaddrinfo(node, port, 0, _socket.SOCK_STREAM, 0, _socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            if listeners and port == 0:
                break  # with port 0, each address would get another port: use one address
            listener = _socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            if family == _socket.AF_INET6:
                listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(1024)
    except (OSError, OverflowError, ValueError) as error:
        for listener in listeners:
            listener.close()
        problem = f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        hint = "pick another address: `edgeinfer serve --host 127.0.0.1 --port 0`"
        raise ServeError(problem, hint=hint) from error
    return [listener.detach() for listener in listeners]


def activated_sockets() -> list[int]:
    """Return the listening sockets that systemd passed (sd_listen_fds(3)); [] if it passed none.

    Raises ServeError if a descriptor is not a listening socket.
    """
    count = os.environ.pop("LISTEN_FDS", "")
    pid = os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return []
    try:
        return [_take_over(descriptor) for descriptor in range(3, 3 + int(count))]
    except (OSError, ValueError) as error:
        problem = f"LISTEN_FDS={count[:20]}, but fewer descriptors from 3 on are listening sockets"
        hint = "start `serve` by a systemd socket, or `unset LISTEN_FDS LISTEN_PID`"
        raise ServeError(problem, hint=hint) from error


def _take_over(descriptor: int) -> int:
    os.set_inheritable(descriptor, False)
    listener = _socket.socket(fileno=descriptor)
    if not listener.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN):
        raise OSError(f"the socket {descriptor} does not listen")
    return listener.detach()
