"""After a thousand hostile requests and vanished clients, the endpoint works and nothing leaks."""

import json
import os
import random
import socket
import struct

import pytest
import raw_http
from fake_engine import FakeEngine
from raw_http import HI_BODY

from edgeinfer.platform.machine import resident_bytes
from edgeinfer.server.limits import Limits

BODY = json.dumps(HI_BODY).encode()
STREAM = raw_http.post(HI_BODY | {"stream": True})
PATHS = """/v1/chat/completions /v1/completions /v1/messages /v1/responses /tokenize /infer /infill
/api/chat /api/generate /api/embed /api/embeddings /api/show /api/pull /v1/models/fake/recall""".split()
ODD_PATHS = ["/v1/%00", "/../../etc/passwd", "//", "/v1/models/" + "%2e" * 50, "/v1/models/%ff"]
NUMBERS = [b"1e400", b"-1e400", b"9" * 400, b"-" + b"9" * 400, b"0x10", b"1.", b"NaN", b"-0", b"1e-999"]


def _hostile(rng: random.Random) -> bytes:
    """Return a random request that is malformed, cut off or absurd."""
    path, number = rng.choice(PATHS), rng.choice(NUMBERS)
    noise = rng.randbytes(rng.randrange(1, 200))
    depth = rng.choice([500, 5_000, 100_000])
    prompts = [rng.choice([b"1", b"[1]", b'"x"', b"-1", b"2e9"])] * rng.randrange(1, 300)
    query = noise.replace(b"\n", b"").replace(b" ", b"")
    head, post = raw_http.head, raw_http.post
    chunked = "transfer-encoding: chunked"
    return rng.choice(
        [
            noise,
            post(BODY[: rng.randrange(len(BODY))], path=path),
            post(BODY, path=path, length=len(BODY) - rng.randrange(1, 20)),
            post(BODY, path=path, length=rng.choice([0, 2**31, 2**63, 2**64, 10**30])),
            post(b'{"messages":[{"role":"user","content":"' + noise + b'"}]}', path=path),
            post(b'{"max_tokens":' + number + b"," + BODY[1:-1] + b',"prompt":"x"}', path=path),
            post(b'{"messages":' + b"[" * depth + b"]" * depth + b"}", path=path),
            post(BODY[:-1] + b',"tools":' + b'[{"a":' * 20_000, path=path),
            head(path, raw_http.JSON, chunked) + b"fffffffff\r\n",
            head(path, raw_http.JSON, "content-length: 5", chunked) + b"0\r\n\r\n",
            head(path, method="GET").replace(b" HTTP", b"?%b HTTP" % query),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
            head("/health", "content-length: 1", "content-length: 2", method="GET") + b"x",
            head("/health", "upgrade: websocket", "connection: upgrade", method="GET"),
            post(b'{"prompt":[' + b",".join(prompts) + b"]}", path="/v1/completions"),
            post(BODY, path=rng.choice(ODD_PATHS)),
        ]
    )


def _send_and_leave(port: int, request: bytes, rng: random.Random) -> None:
    """Send a request, perhaps read a little, and disconnect, perhaps by a reset."""
    with raw_http.connect(port) as client:
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
    live_server = serve(engine, limits=Limits(header_s=10, body_s=10, idle_s=10))
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


def test_pipelined_requests_are_answered_in_order(serve):
    live_server = serve(FakeEngine([["one"], ["two"]]))
    with raw_http.connect(live_server.port) as client:
        client.sendall(raw_http.post(HI_BODY) * 2)
        reply = b""
        while reply.count(b'"timings"') < 2:
            piece = client.recv(65_536)
            assert piece
            reply += piece
    assert reply.index(b'"one"') < reply.index(b'"two"')


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["host: evil.example"], 400),  # a second host
        (["host: localhost"], 400),
        (["content-length: 4", "transfer-encoding: chunked"], 400),
        (["transfer-encoding: gzip, chunked"], 501),
        (["transfer-encoding: gzip", "transfer-encoding: chunked"], 501),
    ],
)
def test_doubtful_framing_is_refused(serve, lines, status):
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    request = raw_http.head(raw_http.CHAT, *lines) + body
    assert raw_http.status(raw_http.exchange(serve().port, request)) == status


def test_nothing_leaks_over_many_requests(serve, until):
    """`make leak-http` does the same with 10,000 requests on the real engine."""
    engine = FakeEngine([["a", "b", "c"]])
    live_server = serve(engine)

    def some(n: int) -> None:
        for number in range(n):
            if number % 10 == 9:
                with raw_http.connect(live_server.port) as client:
                    client.sendall(STREAM)
            else:
                live_server.chat(stream=number % 2 == 0)

    some(300)
    until(lambda: live_server.endpoint.in_flight == 0, "the first to end")
    rss, descriptors = resident_bytes(), _descriptors()
    some(2000)
    until(lambda: live_server.endpoint.in_flight == 0, "all to end")
    until(lambda: engine.metrics().running == 0, "all generations to end")
    until(lambda: _descriptors() <= descriptors, "all descriptors to be closed")
    until(lambda: not live_server.endpoint.running, "all generations to be forgotten")
    until(lambda: live_server.get("/props").json()["models"][0]["in_use"] == 0, "all leases to end")
    grown = resident_bytes() - rss
    engine.requests.clear()
    assert grown < 16 << 20, f"{grown} bytes grew over 2,000 requests"
