"""Describe the process environment for a launch request, and bind the sockets of `serve`."""

from __future__ import annotations

import _socket
import os

from edgeinfer.launcher import selection
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.platform import paths, process

#: Resource limits that an app takes over from its launcher: soft limits, since only root may raise hard
#: ones.
LIMITS = tuple(f"RLIMIT_{name}" for name in "NOFILE CORE CPU FSIZE DATA AS STACK".split())


def describe(request: LaunchRequest) -> None:
    """Fill in a request's environment, folder, umask, CPUs, limits and entropy."""
    import resource  # imported here: it takes 0.2 ms

    request.umask = os.umask(0o077)
    os.umask(request.umask)
    try:
        request.cwd = os.getcwd()
    except OSError:
        request.cwd = "/"
    request.limits = {name: str(resource.getrlimit(getattr(resource, name))[0]) for name in LIMITS}
    request.env = tuple(f"{name}={value}" for name, value in os.environ.items())
    request.affinity = tuple(map(str, os.sched_getaffinity(0)))
    request.entropy = os.urandom(64)


def listen(argv: list[str]) -> list[_socket.socket]:
    """Bind the sockets of `serve` before the model is loaded, so that clients can connect and wait.

    Returns [] if that fails; the app then tries again and reports the error.
    """
    activated = process.activated_descriptors()
    line, serve = CommandLine(argv), selection.read_config().get("serve", {})
    if activated:
        listening = [_socket.socket(fileno=fd) for fd in activated]
    else:
        host = line.value("--host") or str(serve.get("host", "127.0.0.1"))
        listening = _bind(host, line.value("--port") or str(serve.get("port", 8080)))
    if listening and (line.has("--ollama") or serve.get("ollama")):
        listening += _bind(paths.OLLAMA_HOST, str(paths.ollama_port()))
    return listening


def user_lookup() -> _socket.socket | None:
    """Open a netlink socket for `platform.tcp` of a resumed endpoint; None if that is forbidden."""
    try:
        return _socket.socket(_socket.AF_NETLINK, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC, 4)
    except OSError:
        return None


def _bind(host: str, port: str) -> list[_socket.socket]:
    """Listen on every address of `host`; return [] if one of them cannot be bound."""
    listening: list[_socket.socket] = []
    try:
        # for a str, Python would import the IDNA codec (6 ms)
        node = host.encode() if host.isascii() else host
        for family, kind, protocol, _, address in _socket.getaddrinfo(
            node, int(port), 0, _socket.SOCK_STREAM, 0, _socket.AI_PASSIVE
        ):
            if listening and port == "0":
                break  # port 0 binds one free port, not another one for each family
            listener = _socket.socket(family, kind, protocol)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            if family == _socket.AF_INET6:
                listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(1024)
            listening.append(listener)
    except (OSError, ValueError, OverflowError):
        for listener in listening:
            listener.close()
        return []
    return listening
