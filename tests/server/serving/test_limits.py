"""All limits: bodies, headers, slow clients, running requests, queues."""

import contextlib
import errno
import json
import resource
import socket

import httpx2
import pytest
import raw_http
from fake_engine import FakeEngine, StepGate, StuckEngine
from raw_http import HI_BODY, exchange, status

from edgeinfer.cli.endpoint_setup import limits as typed_limits
from edgeinfer.cli.parser import build_parser
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.server.guards import protocol
from edgeinfer.server.limits import Limits

KEYS = ["first-key-0123456789", "second-key-0123456789"]


def test_a_long_body_is_refused_before_it_is_sent(serve):
    live_server = serve(limits=Limits(max_body_bytes=1000))
    assert status(exchange(live_server.port, raw_http.post(b"", length=1001))) == 413
    sent = {"content": b" " * 1001, "headers": {"content-type": "application/json"}}
    assert live_server.client.post("/v1/completions", **sent).status_code == 413
    assert live_server.chat().status_code == 200


def test_a_long_chunked_body_is_refused_when_it_gets_too_long(serve):
    live_server = serve(limits=Limits(max_body_bytes=1000))
    head = raw_http.head("/v1/completions", raw_http.JSON, "transfer-encoding: chunked")
    body = (b"200\r\n" + b" " * 512 + b"\r\n") * 3
    assert status(exchange(live_server.port, head + body)) == 413


@pytest.mark.parametrize(
    ("request_bytes", "refused_as"),
    [
        (raw_http.get("/health", *["a: b"] * 100), 431),
        (raw_http.get("/health", f"x: {'a' * 40_000}"), 431),
        (raw_http.get("/health", f"x: {'a' * 2_000_000}")[:-4], 431),
        (raw_http.get(f"/{'a' * 100_000}"), 414),
        (b"GET /" + b"a" * 2_000_000, 414),
    ],
    ids=["many", "long", "unfinished", "long-url", "unfinished-url"],
)
def test_headers_have_a_number_and_a_size(serve, request_bytes, refused_as):
    live_server = serve()
    assert status(exchange(live_server.port, request_bytes)) == refused_as
    assert live_server.get("/health").status_code == 200


CHUNKED = raw_http.head("/v1/completions", "transfer-encoding: chunked")


@pytest.mark.parametrize(
    "endless",
    [b"2\r\n{}\r\n0\r\nx: ", b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 20, b"2;x=", b"0000"],
    ids=["trailer", "trailers", "extension", "size"],
)
@pytest.mark.parametrize("keys", [[], KEYS], ids=["keyless", "401"])
def test_endless_trailer_is_cut_off(serve, endless, keys):
    with raw_http.connect(serve(keys=keys).port) as client:
        client.sendall(CHUNKED + endless)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"a" * 65_536)
                sent += 65_536
        assert sent < 100 * 65_536  # 6 MB would mean that there is no limit
        assert status(raw_http.read_all(client)) in (0, 400, 401, 431)


def test_trailers_are_no_headers(serve):
    content = json.dumps(HI_BODY).encode()
    body = b"%x\r\n%b\r\n0\r\nx-api-key: %b\r\n\r\n" % (len(content), content, KEYS[0].encode())
    assert status(exchange(serve(keys=KEYS).port, CHUNKED + body)) == 401


def test_unread_body_of_a_refused_request_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr(protocol, "_LINGER_S", 0.05)
    with raw_http.connect(serve(keys=KEYS).port) as client:
        client.sendall(raw_http.post(b"", length=1000))
        reply = raw_http.read_all(client)
    assert status(reply) == 401
    assert reply.count(b"HTTP/1.1 ") == 1


def test_refused_body_that_is_sent_whole_leaves_the_connection_open(serve):
    with raw_http.connect(serve(keys=KEYS).port) as client:
        client.sendall(raw_http.post(HI_BODY) + raw_http.get("/health"))
        reply = raw_http.read_all(client)
    assert [int(response[:3]) for response in reply.split(b"HTTP/1.1 ")[1:]] == [401, 200]


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nhost: loc", b"", b"\r\n\r\n\r\n"])
def test_slow_headers_and_silence_are_cut_off(serve, sent):
    assert status(exchange(serve(limits=Limits(header_s=0.2)).port, sent)) == 408


def test_trickled_headers_do_not_reset_the_deadline(serve, until):
    with raw_http.connect(serve(limits=Limits(header_s=0.4)).port) as client:
        client.settimeout(0.05)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        reply = bytearray()

        def trickle() -> bool:
            try:
                client.sendall(b"a: b\r\n")
                reply.extend(client.recv(1000))
            except TimeoutError:
                return False
            except OSError:
                return True
            return bool(reply)

        until(trickle, "the endpoint to lose patience")
    assert status(bytes(reply)) in (0, 408)


def test_a_slow_body_is_cut_off(serve):
    live_server = serve(limits=Limits(body_s=0.5))
    assert status(exchange(live_server.port, raw_http.post(HI_BODY)[:-10])) == 408
    assert live_server.chat().status_code == 200


def test_a_slow_reader_is_cut_off_and_its_generation_ends(serve, until):
    engine = FakeEngine([["x" * 20_000] * 2000])
    live_server = serve(engine, limits=Limits(write_s=0.3))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", live_server.port))
        client.sendall(raw_http.post(HI_BODY | {"stream": True}))
        until(lambda: len(engine.requests) == 1, "the request to be submitted")
        until(lambda: live_server.endpoint.in_flight == 0, "the endpoint to give up on the reader")
    until(lambda: engine.metrics().running == 0, "the generation to end")
    until(lambda: not live_server.endpoint.running, "the generation to be forgotten")


def _held_engine(gate: StepGate, n: int) -> FakeEngine:
    scripts = [[gate, "late"]] * n + [["next"]]
    return FakeEngine(scripts)


def test_beyond_the_requests_at_once_the_answer_is_503(serve, until):
    gate = StepGate()
    live_server = serve(_held_engine(gate, 2), limits=Limits(max_requests=2))
    asking = [live_server.pool.submit(live_server.chat) for _ in range(2)]
    until(lambda: live_server.endpoint.in_flight == 2, "two requests to run")
    refused = live_server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert live_server.get("/health").status_code == 200
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200, 200]
    assert live_server.chat().status_code == 200
    assert 'edgeinfer_requests_refused_total{limit="requests"} 1.0' in live_server.get("/metrics").text


def test_key_cannot_exceed_its_number_of_requests(serve, until):
    gate = StepGate()
    live_server = serve(_held_engine(gate, 1), limits=Limits(max_per_key=1), keys=KEYS)

    def ask(key: str) -> httpx2.Response:
        return live_server.post(raw_http.CHAT, HI_BODY, headers={"authorization": f"Bearer {key}"})

    asking = live_server.pool.submit(ask, KEYS[0])
    until(lambda: live_server.endpoint.in_flight == 1, "the first request to run")
    refused = ask(KEYS[0])
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert "retry-after" in refused.headers
    assert ask(KEYS[1]).status_code == 200
    gate.opened.set()
    assert asking.result().status_code == 200


def test_queue_of_a_model_is_bounded(serve, until):
    gate = StepGate()
    engine = FakeEngine([[gate, "late"]])  # it decodes four sequences at once
    live_server = serve(engine, limits=Limits(max_queue=2))
    asking = [live_server.pool.submit(live_server.chat) for _ in range(5)]
    until(lambda: engine.metrics().running == 5, "five to be inside")
    assert live_server.chat(n=2).status_code == 503
    asking.append(live_server.pool.submit(live_server.chat))
    until(lambda: engine.metrics().running == 6, "the sixth to be inside")
    for stream in (False, True):
        refused = live_server.chat(stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 6
    assert live_server.chat().status_code == 200
    assert not live_server.endpoint.generation_counts


def test_connections_are_limited(serve):
    live_server = serve(limits=Limits(max_connections=3))
    with contextlib.ExitStack() as stack:
        *_, extra = [stack.enter_context(raw_http.connect(live_server.port)) for _ in range(4)]
        assert status(extra.recv(1000)) == 503


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def test_expensive_schemas_delay_only_schemas_and_fail_health(serve, until):
    engine = StuckEngine()
    live_server = serve(engine, limits=Limits(prepare_s=1))
    slow = {"messages": [{"role": "user", "content": "slow"}], "response_format": SCHEMA}
    asking = [live_server.pool.submit(live_server.chat, **slow) for _ in range(4)]
    answers = [future.result(60) for future in asking]
    assert {answer.status_code for answer in answers} == {503}
    assert answers[0].json()["error"]["code"] == "preparation_timeout"
    until(lambda: live_server.get("/health").status_code == 503, "the stalled threads to be seen")
    assert "compile" in live_server.get("/health").json()["error"]
    assert live_server.chat().status_code == 200
    engine.opened.set()
    until(lambda: live_server.get("/health").status_code == 200, "the threads to be free")
    until(lambda: not engine.metrics().running, "late generations to be cancelled")
    assert live_server.chat(**slow).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "TEXT"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/completions", {"prompt": "TEXT"}),
        (
            "/v1/messages/count_tokens",
            {"model": "m", "messages": [{"role": "user", "content": "TEXT"}]},
        ),
        ("/v1/embeddings", {"input": "TEXT"}),
    ],
)
def test_text_that_no_context_holds_is_not_tokenized(serve, chatterer, monkeypatch, path, body):
    live_server = serve(chatterer(), aliases={"m": "chatterer"})
    tokenized: list[int] = []
    tokenize = Vocab.tokenize

    def record(self, text, **options):
        tokenized.append(len(text))
        return tokenize(self, text, **options)

    monkeypatch.setattr(Vocab, "tokenize", record)
    raw = json.dumps(body).replace("TEXT", "a" * ((1 << 20) + 1))
    reply = live_server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "256" in reply.text  # each API's error names the context size
    assert max(tokenized, default=0) < 1 << 20


class _Failing(FakeEngine):
    """An engine whose `health` returns the text `wrong`."""

    wrong = ""

    def health(self) -> str:
        return self.wrong


def test_engine_that_has_failed_fails_health(serve):
    engine = _Failing()
    live_server = serve(engine)
    assert live_server.get("/health").status_code == 200
    engine.wrong = "the decode loop has ended"
    health = live_server.get("/health")
    assert (health.status_code, health.json()["error"]) == (503, "the decode loop has ended")


def test_exhausted_descriptors_are_logged_once(serve, until):
    live_server = serve()
    context = {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")}

    def fail() -> None:
        for _ in range(1000):
            live_server.loop.call_exception_handler(context)

    live_server.loop.call_soon_threadsafe(fail)
    until(lambda: "connections-wait" in live_server.log.getvalue(), "the line")
    assert live_server.get("/health").status_code == 200
    assert live_server.log.getvalue().count("Too many open files") == 1


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ((256, 4096), 4096, 1024),
        ((1024, 1024), 1024, 896),
        ((64, 64), 64, 16),
        ((1024, -1), 65_536, 1024),
    ],
)
def test_connections_stay_below_the_descriptors(monkeypatch, before, after, most):
    limit = list(before)
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limit.__setitem__(slice(2), new))
    options = build_parser("serve").parse_args(["serve"])
    assert typed_limits(options).max_connections == most
    assert limit[0] == after


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA | {"json_schema": {"name": "n", "schema": {"maximum": "N"}}}},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"maximum": "N"}}}}}]},
        {"chat_template_kwargs": {"n": "N"}},
    ],
    ids=["schema", "tool", "template"],
)
def test_an_integer_beyond_64_bits_is_refused(live_server, number, fields):
    body = json.dumps(HI_BODY | fields)
    bodies = (body.replace('"N"', str(n)).encode() for n in (number, 2**63))
    refused, accepted = (exchange(live_server.port, raw_http.post(raw)) for raw in bodies)
    assert status(refused) == 400
    assert b"beyond 64 bits" in refused
    assert b"beyond 64 bits" not in accepted
