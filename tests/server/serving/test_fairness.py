"""API keys share slots of the engine, threads and memory: none can take them all."""

import asyncio
import contextlib
import socket
from collections import Counter

import pytest
import raw_http
from fake_engine import FakeEngine, StepGate, StuckEngine
from served_endpoint import with_page

from edgeinfer.platform.machine import resident_bytes
from edgeinfer.server.callers import EngineSlots
from edgeinfer.server.limits import Limits
from edgeinfer.server.web.routes import WEB

KEYS = ["busy-key-0123456789", "other-key-0123456789"]
BUSY, OTHER = KEYS
SLOW = {"messages": [{"role": "user", "content": "slow"}]}


def _ask(live_server, key: str, text: str = "hi", **body):
    turns = [{"role": "user", "content": text}]
    return live_server.post(raw_http.CHAT, {"messages": turns} | body, headers={"x-api-key": key})


def _slow_engine(gate: StepGate) -> FakeEngine:
    """Return an engine whose answer to "slow" waits at the gate."""
    return FakeEngine(lambda request: [gate] if request.messages[-1].content == "slow" else ["done"])


def test_key_leaves_one_slot_to_others(serve, until):
    gate = StepGate()
    engine = _slow_engine(gate)
    live_server = serve(engine, keys=KEYS)  # the engine decodes four sequences at once
    asking = [live_server.pool.submit(_ask, live_server, BUSY, "slow") for _ in range(12)]
    until(lambda: live_server.endpoint.generation_counts["fake"] == 12, "twelve requests to wait")
    assert len(engine.requests) == 3
    assert _ask(live_server, OTHER).status_code == 200
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 12
    assert not live_server.endpoint.engine_slots


@pytest.mark.parametrize("limits", [Limits(max_queue=2), Limits(max_requests=6)], ids=["queue", "all"])
def test_key_is_not_refused_for_the_requests_of_others(serve, until, limits):
    gate = StepGate()
    live_server = serve(_slow_engine(gate), keys=KEYS, limits=limits)
    asking = [live_server.pool.submit(_ask, live_server, BUSY, "slow") for _ in range(6)]
    until(lambda: live_server.endpoint.in_flight == 6, "six requests to wait")
    refused = _ask(live_server, BUSY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert _ask(live_server, OTHER).status_code == 200
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 6
    assert not live_server.endpoint.engine_slots


_PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
_TOOL = {"type": "function", "function": {"name": "twice", "parameters": {}}}


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tools": [_TOOL, _TOOL]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}]}
            ]
        },
    ],
    ids=["required", "same name", "picture"],
)
def test_wrong_requests_are_refused_without_a_wait_for_a_slot(serve, until, body):
    gate = StepGate()
    live_server = serve(_slow_engine(gate), keys=KEYS)
    asking = [live_server.pool.submit(_ask, live_server, BUSY, "slow") for _ in range(12)]
    until(lambda: live_server.endpoint.generation_counts["fake"] == 12, "twelve requests to wait")
    assert _ask(live_server, BUSY, **body).status_code == 400
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 12


def test_only_key_may_use_all_slots(serve, until):
    gate = StepGate()
    engine = FakeEngine([[gate]])
    live_server = serve(engine, keys=[BUSY])
    asking = [live_server.pool.submit(_ask, live_server, BUSY) for _ in range(12)]
    until(lambda: len(engine.requests) == 12, "all to be in the engine")
    gate.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 12


def test_slots_of_disconnected_clients_are_released(serve, until):
    live_server = serve(_slow_engine(StepGate()), keys=KEYS)
    clients = [raw_http.connect(live_server.port) for _ in range(9)]
    for client in clients:
        client.sendall(raw_http.post(SLOW, f"x-api-key: {BUSY}"))
    until(lambda: live_server.endpoint.generation_counts["fake"] == 9, "nine requests to wait")
    for client in clients:
        client.close()
    until(lambda: not live_server.endpoint.generation_counts, "all to be forgotten")
    assert not live_server.endpoint.engine_slots
    assert _ask(live_server, BUSY).status_code == 200


def test_waiting_stream_gets_the_comment_queued(serve, until):
    gate = StepGate()
    engine = _slow_engine(gate)
    live_server = serve(engine, keys=KEYS, limits=Limits(patience_s=0.05, comment_s=0.05))
    asking = [live_server.pool.submit(_ask, live_server, BUSY, "slow") for _ in range(3)]
    until(lambda: len(engine.requests) == 3, "three to run")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"x-api-key": BUSY}
    with live_server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()
        assert next(line for line in lines if line) == ": queued"
        gate.opened.set()
        assert "data: [DONE]" in list(lines)
    assert all(future.result().status_code == 200 for future in asking)


def test_callers_take_turns():
    async def main() -> list[str]:
        slots = EngineSlots()
        slots.n_parallel = 1
        order: list[str] = []

        async def ask(caller: str) -> None:
            await slots.take(caller, 1)
            order.append(caller)
            await asyncio.sleep(0)
            slots.give_back(caller, 1)

        async with asyncio.TaskGroup() as group:
            for caller in "aaaaabbc":
                group.create_task(ask(caller))
        return order

    order = asyncio.run(main())
    assert Counter(order) == Counter("aaaaabbc")
    assert order.index("c") < 3
    assert order[-3:] == ["a"] * 3


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def test_schemas_of_one_key_do_not_stop_those_of_another(serve):
    engine = StuckEngine()
    live_server = serve(engine, keys=KEYS)
    slow = (_ask, live_server, BUSY, "slow")
    asking = [live_server.pool.submit(*slow, response_format=SCHEMA) for _ in range(6)]
    assert engine.inside.acquire(timeout=60)
    assert _ask(live_server, OTHER, response_format=SCHEMA).status_code == 200
    assert _ask(live_server, BUSY).status_code == 200
    engine.opened.set()
    assert [future.result().status_code for future in asking] == [200] * 6


def test_calls_of_one_key_do_not_stop_those_of_another(serve):
    engine = StuckEngine()
    live_server = serve(engine, keys=KEYS)

    def tokenize(key: str, text: str) -> int:
        body, headers = {"content": text}, {"x-api-key": key}
        return live_server.post("/tokenize", body, headers=headers).status_code

    asking = [live_server.pool.submit(tokenize, BUSY, "slow") for _ in range(12)]
    for _ in range(4):
        assert engine.inside.acquire(timeout=60)
    assert tokenize(OTHER, "a") == 200
    assert live_server.get("/v1/models", headers={"x-api-key": OTHER}).status_code == 200
    engine.opened.set()
    assert [future.result() for future in asking] == [200] * 12


def _send_body(stack, live_server, sent: int, length: int, *lines: str) -> socket.socket:
    """Send a request with the first `sent` bytes of its body; return the connection."""
    client = stack.enter_context(raw_http.connect(live_server.port))
    client.sendall(raw_http.post(b" " * sent, *lines, path="/v1/completions", length=length))
    return client


def test_bodies_of_all_requests_have_a_limit_together(serve, until):
    live_server = serve(limits=Limits(max_body_bytes=60_000, max_bodies_bytes=100_000))
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            _send_body(stack, live_server, 40_000, 50_000)
        until(lambda: live_server.endpoint.bodies.total == 80_000, "two bodies to be read")
        refused = _send_body(stack, live_server, 40_000, 50_000)
        assert raw_http.status(refused.recv(1000)) == 503
    until(lambda: not live_server.endpoint.bodies.total, "the bodies to be forgotten")
    assert live_server.chat().status_code == 200
    until(lambda: not live_server.endpoint.bodies.total, "the body to be forgotten")


def test_body_of_a_stored_response_counts_once(serve, until):
    limits = Limits(max_body_bytes=60_000, max_bodies_bytes=100_000)
    live_server = serve(store_responses=True, limits=limits)
    body = b" " * 58_000 + b'{"model": "fake", "input": "hi"}'
    json_type = {"content-type": "application/json"}
    assert live_server.client.post("/v1/responses", content=body, headers=json_type).status_code == 200
    until(lambda: not live_server.endpoint.bodies.total, "the body to be forgotten")


def test_bodies_of_one_key_leave_room_for_others(serve, until):
    live_server = serve(keys=KEYS, limits=Limits(max_body_bytes=40_000, max_bodies_bytes=100_000))
    key = f"x-api-key: {BUSY}"
    with contextlib.ExitStack() as stack:
        _send_body(stack, live_server, 35_000, 40_000, key)
        until(lambda: live_server.endpoint.bodies.total == 35_000, "a body to be read")
        refused = _send_body(stack, live_server, 35_000, 40_000, key)
        assert raw_http.status(refused.recv(1000)) == 429
        assert _ask(live_server, OTHER).status_code == 200


OPEN = [operation.path for operation in WEB.operations if operation.web == "open"]


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_unfinished_bodies_without_a_key_take_no_memory(serve, framing):
    live_server = with_page(serve(keys=KEYS), KEYS)
    before = resident_bytes()
    line, piece = f"content-length: {31 << 20}", b" " * 65_536
    if framing == "chunked":
        line, piece = "transfer-encoding: chunked", b"10000\r\n" + piece + b"\r\n"
    for path in [*OPEN, "/health"]:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                client = stack.enter_context(raw_http.connect(live_server.port))
                client.settimeout(0.2)
                client.sendall(raw_http.head(path, line))
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        client.sendall(piece)
            assert live_server.get("/health").status_code == 200
    assert resident_bytes() - before < 40 << 20
