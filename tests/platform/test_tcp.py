"""The user at the other end of a TCP connection, or listening on a port."""

import os
import socket
from collections.abc import Iterator

import pytest

from edgeinfer.platform import tcp

MAPPED = "::ffff:127.0.0.1"


@pytest.fixture(params=["kernel", "tables"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use netlink, then /proc/net."""
    if request.param == "tables":
        monkeypatch.setattr(tcp, "_NETLINK_SOCK_DIAG", 9999)  # an unknown protocol raises OSError
    return str(request.param)


@pytest.fixture(params=["127.0.0.1", "::1", MAPPED])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a server's and a client's end; the client may use IPv4 mapped to IPv6."""
    host = "127.0.0.1" if request.param == MAPPED else request.param
    client_family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with (
        socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as listener,
        socket.socket(client_family) as client,
    ):
        client.connect((request.param, listener.getsockname()[1]))
        server, _ = listener.accept()
        with server:
            yield server, client


def test_peer_is_told_by_its_user(source: str, connection) -> None:
    server, client = connection
    assert tcp.peer_of(server) == tcp.Peer(os.getuid())
    assert tcp.peer_of(client) == tcp.Peer(os.getuid())


def test_closed_peer_is_nobody(source: str, connection) -> None:
    """Close the peer: the kernel then reports root as its user."""
    server, client = connection
    client.close()
    assert tcp.peer_of(server) is None


def test_half_closed_peer_still_reads(connection) -> None:
    server, client = connection
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    assert tcp.peer_of(server) == tcp.Peer(os.getuid(), is_half_closed=True)
    client.shutdown(socket.SHUT_RD)
    assert tcp.peer_of(server) == tcp.Peer(os.getuid(), is_half_closed=False)


def test_unix_sockets_peer_is_left_to_the_file_system() -> None:
    a, b = socket.socketpair()
    with a, b:
        assert tcp.peer_of(a) is None


def test_listener_is_told_by_its_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert tcp.listener_uids(port) == {os.getuid()}
    assert tcp.listener_uids(port) == set()
