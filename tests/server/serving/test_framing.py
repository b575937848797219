"""HTTP/1.0, odd requests, and clients that disconnect."""

import json
import logging
import socket

import pytest
import raw_http
from fake_engine import FakeEngine, StepGate
from raw_http import HI_BODY

from edgeinfer.server.guards import protocol


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_of_http_1_0_gets_no_chunks(serve, is_stream):
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, *map(str, range(50))]]))
    with raw_http.connect(live_server.port) as client:
        client.sendall(raw_http.post(HI_BODY | {"stream": is_stream}, version="1.0"))
        assert gate.reached.wait(60)
        gate.opened.set()
        head, _, body = raw_http.read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    if is_stream:
        lines = body.split(b"\n\n")
        assert all(line.startswith((b"data: ", b": ")) or not line for line in lines)
        assert lines[-2:] == [b"data: [DONE]", b""]
    else:
        assert json.loads(body)["choices"][0]["message"]["content"].endswith("4849")


def test_pieces_of_a_reply_are_sent_without_waiting_for_an_ack(serve):
    live_server = serve()
    assert live_server.get("/health").status_code == 200  # the client keeps this connection open
    (connection,) = live_server.server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("version", ["2.0", "0.9", "1.2"])
def test_other_versions_are_refused(serve, version):
    request = raw_http.head("/health", method="GET", version=version)
    assert raw_http.status(raw_http.exchange(serve().port, request)) in (505, 400)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://evil.example:80/v1/models", "localhost", 403),
        ("http://localhost/v1/models", "localhost", 200),
        ("http://localhost:8080/v1/models", "evil.example", 200),
        ("http://[::1]:8080/v1/models", "localhost", 200),
    ],
)
def test_host_of_an_absolute_target_counts(serve, target, host, status):
    request = raw_http.get(target).replace(b"host: localhost", b"host: " + host.encode())
    assert raw_http.status(raw_http.exchange(serve().port, request)) == status


def test_allow_names_head(serve):
    reply = serve().client.request("DELETE", "/health")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("resets", [True, False])
def test_half_closed_client_that_leaves_ends_its_answer(serve, until, monkeypatch, is_stream, resets):
    monkeypatch.setattr(protocol, "_WATCH_S", 0.05)
    gate = StepGate()
    engine = FakeEngine([["one ", "two ", gate]])
    live_server = serve(engine)
    client = raw_http.connect(live_server.port)
    client.sendall(raw_http.post(HI_BODY | {"stream": is_stream}))
    client.shutdown(socket.SHUT_WR)
    assert gate.reached.wait(60)
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    until(lambda: not engine.metrics().running, "the generation to end")
    until(lambda: not live_server.endpoint.in_flight, "the request to end")


@pytest.mark.parametrize(("is_stream", "ending"), [(True, b"[DONE]"), (False, b"one two")])
def test_half_closed_client_that_stays_is_answered(serve, monkeypatch, is_stream, ending):
    monkeypatch.setattr(protocol, "_WATCH_S", 0.02)
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, "two"]]))
    with raw_http.connect(live_server.port) as client:
        client.sendall(raw_http.post(HI_BODY | {"stream": is_stream}))
        client.shutdown(socket.SHUT_WR)
        assert gate.reached.wait(60)
        live_server.get("/health")
        gate.opened.set()
        assert ending in raw_http.read_all(client)


def test_loggers_of_the_loop_write_lines_of_the_log(serve):
    live_server = serve()
    logging.getLogger("asyncio").warning("socket.send() raised exception.")
    line = live_server.log.getvalue().splitlines()[-1]
    assert json.loads(line)["message"] == "socket.send() raised exception."
