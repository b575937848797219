"""After a thousand hostile requests and vanished clients, the endpoint works and nothing leaks."""

import json
import os
import random
import socket
import struct

import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.platform.machine import resident_bytes
from edgeinfer.server.limits import Limits

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()


PATHS = [
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/messages",
    b"/v1/responses",
    b"/tokenize",
    b"/infer",
    b"/infill",
    b"/api/chat",
    b"/api/generate",
    b"/api/embed",
    b"/api/embeddings",
    b"/api/show",
    b"/api/pull",
    b"/v1/models/fake/recall",
]
ODD_PATHS = [b"/v1/%00", b"/../../etc/passwd", b"//", b"/v1/models/" + b"%2e" * 50, b"/v1/models/%ff"]
NUMBERS = [b"1e400", b"-1e400", b"9" * 400, b"-" + b"9" * 400, b"0x10", b"1.", b"NaN", b"-0", b"1e-999"]
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def _head(path: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path


def _post(body: bytes, path: bytes = b"/v1/chat/completions", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return _head(path) + b"content-length: %d\r\n\r\n" % size + body


def _hostile(rng: random.Random) -> bytes:
    """Return a random request that is malformed, cut off or absurd."""
    path, number = rng.choice(PATHS), rng.choice(NUMBERS)
    noise = rng.randbytes(rng.randrange(1, 200))
    depth = rng.choice([500, 5_000, 100_000])
    prompts = [rng.choice([b"1", b"[1]", b'"x"', b"-1", b"2e9"])] * rng.randrange(1, 300)
    query = noise.replace(b"\n", b"").replace(b" ", b"")
    return rng.choice(
        [
            noise,
            _post(BODY[: rng.randrange(len(BODY))], path),
            _post(BODY, path, len(BODY) - rng.randrange(1, 20)),
            _post(BODY, path, rng.choice([0, 2**31, 2**63, 2**64, 10**30])),
            _post(b'{"messages":[{"role":"user","content":"' + noise + b'"}]}', path),
            _post(b'{"max_tokens":' + number + b"," + BODY[1:-1] + b',"prompt":"x"}', path),
            _post(b'{"messages":' + b"[" * depth + b"]" * depth + b"}", path),
            _post(BODY[:-1] + b',"tools":' + b'[{"a":' * 20_000, path),
            _head(path) + b"transfer-encoding: chunked\r\n\r\nfffffffff\r\n",
            _head(path) + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET %b?%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (path, query),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
            HEALTH + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx",
            HEALTH + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            _post(b'{"prompt":[' + b",".join(prompts) + b"]}", b"/v1/completions"),
            _post(BODY, rng.choice(ODD_PATHS)),
        ]
    )


def _send_and_leave(port: int, request: bytes, rng: random.Random) -> None:
    """Send a request, perhaps read a little, and disconnect, perhaps by a reset."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(0.02)
        try:
            client.sendall(request)
            if rng.random() < 0.5:
                client.recv(4096)
        except OSError:
            pass
        if rng.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["scripted", "real"])
def test_a_thousand_hostile_requests_change_nothing(serve, until, chatterer, kind):
    engine = chatterer() if kind == "real" else FakeEngine([["a", "b"]])
    live_server = serve(engine, limits=Limits(header_s=1, body_s=1, idle_s=2))
    assert live_server.chat().status_code == 200
    before = _descriptors()
    rng = random.Random(20_260_101)
    for number in range(1000):
        _send_and_leave(live_server.port, _hostile(rng), rng)
        if number % 100 == 99:
            assert live_server.chat().status_code == 200, f"after {number + 1} hostile requests"
    until(lambda: live_server.endpoint.in_flight == 0, "every request to end")
    until(lambda: engine.metrics().running == 0, "every generation to end")
    until(lambda: _descriptors() <= before, "every connection to be closed")
    assert live_server.get("/health").status_code == 200
    assert '"event":"internal"' not in live_server.log.getvalue()


def test_a_disconnect_in_the_middle_of_a_stream_cancels(serve, until):
    gates = [StepGate() for _ in range(20)]
    engine = FakeEngine([["a", gate, "b"] for gate in gates])
    live_server = serve(engine)
    for gate in gates:
        client = socket.create_connection(("127.0.0.1", live_server.port))
        client.sendall(_post(STREAM))
        assert gate.reached.wait(20)
        client.close()
    until(lambda: engine.metrics().cancelled_total == 20, "all twenty to be cancelled")
    until(
        lambda: not live_server.endpoint.running and live_server.endpoint.in_flight == 0,
        "all twenty to be gone",
    )


def test_a_disconnect_before_a_whole_answer_cancels(serve, until):
    gate = StepGate()
    engine = FakeEngine([["a", gate, "b"], ["next"]])
    live_server = serve(engine)
    with socket.create_connection(("127.0.0.1", live_server.port)) as client:
        client.sendall(_post(BODY))
        assert gate.reached.wait(20)
    until(lambda: engine.metrics().cancelled_total == 1, "the generation to be cancelled")
    assert live_server.chat().json()["choices"][0]["message"]["content"] == "next"


def test_pipelined_requests_are_answered_in_order(serve, raw_exchange):
    live_server = serve(FakeEngine([["one"], ["two"]]))
    with socket.create_connection(("127.0.0.1", live_server.port)) as client:
        client.settimeout(20)
        client.sendall(_post(BODY) + _post(BODY))
        reply = b""
        while reply.count(b'"timings"') < 2:
            piece = client.recv(65_536)
            assert piece
            reply += piece
    assert reply.index(b'"one"') < reply.index(b'"two"')


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"host: localhost\r\nhost: evil.example\r\n", b" 400 "),
        (b"host: localhost\r\nhost: localhost\r\n", b" 400 "),
        (b"host: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n", b" 400 "),
        (b"host: localhost\r\ntransfer-encoding: gzip, chunked\r\n", b" 501 "),
        (b"host: localhost\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", b" 501 "),
    ],
)
def test_doubtful_framing_is_refused(serve, raw_exchange, lines, status):
    live_server = serve()
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + lines + b"\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert status in raw_exchange(live_server.port, head + body).splitlines()[0]


@pytest.mark.parametrize("count", [2000])
def test_nothing_leaks_over_many_requests(serve, until, count):
    """`make leak-http` does the same with 10,000 requests on the real engine."""
    engine = FakeEngine([["a", "b", "c"]])
    live_server = serve(engine)

    def some(n: int) -> None:
        for number in range(n):
            if number % 10 == 9:
                with socket.create_connection(("127.0.0.1", live_server.port)) as client:
                    client.sendall(_post(STREAM))
            else:
                live_server.chat(stream=number % 2 == 0)

    some(300)
    until(lambda: live_server.endpoint.in_flight == 0, "the first to end")
    rss, descriptors = resident_bytes(), _descriptors()
    some(count)
    until(lambda: live_server.endpoint.in_flight == 0, "all to end")
    until(lambda: engine.metrics().running == 0, "all generations to end")
    until(lambda: _descriptors() <= descriptors, "all descriptors to be closed")
    until(lambda: not live_server.endpoint.running, "all generations to be forgotten")
    until(lambda: live_server.get("/props").json()["models"][0]["in_use"] == 0, "all leases to end")
    grown = resident_bytes() - rss
    engine.requests.clear()
    assert grown < 16 << 20, f"{grown} bytes grew over {count} requests"
