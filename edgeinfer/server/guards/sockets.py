"""Bind listening sockets, and tell what is known of them and to the service manager."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
from collections.abc import Sequence

from edgeinfer.errors import ServeError

_MOST_DESCRIPTORS = 65_536


def bind(host: str, port: int, backlog: int = 1024) -> list[socket.socket]:
    """Bind listening TCP sockets on every address of `host`. Raises ServeError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServeError(
            f"{host} is not an address of this machine: {error.strerror or error}"
        ) from error
    found: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        if found and port == 0:
            break  # one free port, not one for each family
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            for other in found:
                other.close()
            raise ServeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        found.append(listener)
    return found


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to its hard one, 65,536 at most; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _addresses(listeners: Sequence[socket.socket]) -> list[tuple[str, int]]:
    inet = [one.getsockname() for one in listeners if one.family != socket.AF_UNIX]
    return [(name[0].partition("%")[0], name[1]) for name in inet]


def has_port(listeners: Sequence[socket.socket], port: int) -> bool:
    return any(bound == port for _, bound in _addresses(listeners))


def is_loopback(listeners: Sequence[socket.socket]) -> bool:
    """Return whether only this machine can reach `listeners`; a unix socket counts as local."""
    return all(ipaddress.ip_address(host).is_loopback for host, _ in _addresses(listeners))


def url(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL as a client would type it, e.g. `http://127.0.0.1:8080`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def own_names(listeners: Sequence[socket.socket]) -> set[str]:
    """Return the host names of these addresses, beside loopback's."""
    return {f"[{host}]" if ":" in host else host for host, _ in _addresses(listeners)}


def notify(*lines: str) -> bool:
    """Notify the service manager; return whether there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto("\n".join(lines).encode(), target)
    except OSError:
        return False
    return True
