"""Replicas of a model: their number, the routing of requests, and the death of a replica."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine, StepGate
from msgspec.structs import replace
from other_processes import wait_until

from edgeinfer.errors import EngineClosedError, ModelLoadError
from edgeinfer.host import ProcessStart
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import Finished, Progress, TextDelta, Timings, Usage
from edgeinfer.runtime.options import Adapter, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.workers.remote_engine import RemoteEngine, serve_engine
from edgeinfer.workers.replica_supervisor import ReplicaSupervisor
from edgeinfer.workers.replicas import Replica, RoutedRequest

END = Finished(reason="stop", usage=Usage(), timings=Timings())


def _route(ends: list[str]) -> RoutedRequest:
    request = GenerateRequest(prompt="x")
    return RoutedRequest(request, lambda _: ends.append("end"), lambda _: ends.append("lost"))


def test_queued_request_can_be_withdrawn_and_a_begun_one_cannot():
    ends: list[str] = []
    request = _route(ends)
    cancelled: list[int] = []
    first = EventStream(lambda: cancelled.append(1))
    request.follow(first)
    first.put(Progress(0, 9, queued=True))
    assert request.is_waiting
    assert request.withdraw()
    first.put(END)  # the event of a cancelled request is dropped
    second = EventStream(lambda: cancelled.append(2))
    second.put(Progress(0, 9, queued=True))
    second.put(TextDelta("a"))
    request.follow(second)
    assert not request.withdraw()
    second.put(END)
    assert [type(event) for event in request.stream] == [Progress, Progress, TextDelta, Finished]
    assert (ends, cancelled) == (["end"], [1])


def test_request_cancelled_between_two_replicas_is_cancelled_in_the_second():
    request = _route([])
    first = EventStream(lambda: None)
    request.follow(first)
    assert request.withdraw()
    request.cancel()
    cancelled = threading.Event()
    request.follow(EventStream(cancelled.set))
    assert cancelled.is_set()


class Shop:
    """Starts replicas: scripted engines in threads, behind sockets. A test can end each."""

    def __init__(self, script=("a",), n_parallel: int = 2) -> None:
        self.info = replace(DEFAULT_INFO, n_parallel=n_parallel)
        self.script = script
        self.engines: list[FakeEngine] = []
        self.sockets: list[socket.socket] = []
        self.refusal: Exception | None = None
        self.heard: list[ReplicasInfo] = []
        self.workers: list[threading.Thread] = []

    def start(self, first, n_threads: int) -> Replica:
        if self.refusal is not None:
            raise self.refusal
        engine = FakeEngine([self.script], info=self.info)
        engine.n_threads = n_threads
        self.engines.append(engine)
        live_server, worker_end = socket.socketpair()
        self.sockets.append(worker_end)
        started = (worker_end, lambda progress: (engine, ProcessStart(how="resumed")))
        worker = threading.Thread(target=serve_engine, args=started, daemon=True)
        worker.start()
        self.workers.append(worker)
        return Replica(RemoteEngine(live_server), "resumed", n_threads)

    def kill(self, index: int) -> None:
        self.sockets[index].shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def open(self, count: int = 2, cores: int = 4) -> Iterator:
        supervisor = ReplicaSupervisor(self.start, count, cores, self.heard.append)
        try:
            yield supervisor.engine
        finally:
            supervisor.engine.close()
            for worker in self.workers:
                worker.join(60)


def _text(stream) -> str:
    return "".join(event.text for event in stream if isinstance(event, TextDelta))


def test_requests_are_routed_by_prefix_then_by_load():
    shop = Shop()
    with shop.open() as engine:
        wait_until(lambda: len(engine.usable) == 2, "two replicas")
        assert engine.info.n_parallel == 4
        wait_until(lambda: [fake.n_threads for fake in shop.engines] == [2, 2], "cores that are shared")
        gate = StepGate(threading.Event())
        shop.engines[0]._choose = lambda request: (gate, "a")
        busy = engine.submit(GenerateRequest(prompt="one " * 400))
        assert gate.reached.wait(60)
        for n in range(3):  # these go to the other replica, which has fewer requests
            assert _text(engine.submit(GenerateRequest(prompt="two " * 400 + str(n)))) == "a"
        gate.opened.set()
        assert _text(busy) == "a"
        assert [len(fake.requests) for fake in shop.engines] == [1, 3]
        for n in range(2):
            list(engine.submit(GenerateRequest(prompt="two " * 400 + f"more {n}")))
            list(engine.submit(GenerateRequest(prompt="one " * 400 + f"more {n}")))
        assert [len(fake.requests) for fake in shop.engines] == [3, 5]
        assert engine.tokenize("ab") == [97, 98]
        assert len(engine.embed(["x"])) == 1
        assert engine.metrics().requests_total == 8
        assert [replica.number for replica in engine.replicas().running] == [1, 2]


def test_crashed_replica_ends_its_requests_alone_and_is_replaced():
    gate = StepGate(threading.Event())
    shop = Shop(script=("a", gate, "b"))
    with shop.open() as engine:
        wait_until(lambda: len(engine.usable) == 2, "two replicas")
        streams = [engine.submit(GenerateRequest(prompt=str(n))) for n in range(2)]
        wait_until(lambda: all(fake.requests for fake in shop.engines), "a request in each")
        wait_until(lambda: not engine.waiting, "both to have begun")
        dead = 0 if shop.engines[0].requests[0].prompt == "0" else 1
        shop.kill(dead)
        with pytest.raises(EngineClosedError):
            list(streams[0])
        wait_until(lambda: len(engine.usable) == 2, "another replica")
        gate.opened.set()
        assert _text(streams[1]) == "ab"
        assert engine.replicas().crashed_total == 1
        assert {replica.number for replica in engine.replicas().running} == {1, 2, 3} - {dead + 1}
        assert engine.is_open
    assert [info.reason for info in shop.heard if "has ended" in info.reason]


def test_requests_wait_for_the_replacement_of_the_last_replica():
    shop = Shop()
    with shop.open(count=1) as engine:
        shop.kill(0)
        assert _text(engine.submit(GenerateRequest(prompt="x"))) == "a"
        shop.refusal = ModelLoadError("the file is gone")
        shop.kill(1)
        with pytest.raises(EngineClosedError):
            engine.submit(GenerateRequest(prompt="x"))
        assert not engine.is_open
        with pytest.raises(EngineClosedError):
            engine.tokenize("x")


def test_adapters_are_applied_to_every_replica_and_to_added_ones():
    shop = Shop()
    with shop.open() as engine:
        wait_until(lambda: len(engine.usable) == 2, "two replicas")
        red = Adapter("red", "/red.gguf", 0.5)
        assert engine.use_adapters([red]) == engine.info.lora == (red,)
        shop.kill(0)
        wait_until(lambda: len(shop.engines) == 3 and len(engine.usable) == 2, "another in its place")
        assert [fake.info.lora for fake in shop.engines[1:]] == [(red,), (red,)]
        assert engine.use_adapters([]) == engine.info.lora == ()
        assert [fake.info.lora for fake in shop.engines[1:]] == [(), ()]


def test_worker_whose_decode_loop_has_failed_ends() -> None:
    class Dead(FakeEngine):
        def health(self) -> str:
            return "the decode loop failed: MemoryError: no more"

    live_server, worker_end = socket.socketpair()
    started = (worker_end, lambda progress: (Dead(), ProcessStart()))
    thread = threading.Thread(target=serve_engine, args=started)
    thread.start()
    engine = RemoteEngine(live_server)
    assert engine.health() == ""
    with contextlib.suppress(EngineClosedError):
        list(engine.submit(GenerateRequest(prompt="x", max_tokens=1)))
    thread.join(60)
    assert not thread.is_alive()
    engine.close()
    assert "has ended" in engine.health()
