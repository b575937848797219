"""Copies of a model: when there is another number of them, which one a request goes to, what moves, what ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from edgeinfer.errors import ConfigError, EngineClosedError, ModelLoadError
from edgeinfer.host import Start
from edgeinfer.runtime.events import Finished, Progress, TextDelta, Timings, Usage
from edgeinfer.runtime.fake import DEFAULT_INFO, FakeEngine, Gate
from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.options import Adapter, CopiesInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.settings.config import copies_range, load_config
from edgeinfer.workers.client import RemoteEngine
from edgeinfer.workers.copies.copies_engine import Copy
from edgeinfer.workers.copies.growth import Bounds, Growth, Seen
from edgeinfer.workers.copies.minding import Minder
from edgeinfer.workers.copies.ticket import Ticket
from edgeinfer.workers.server import serve

BOUNDS = Bounds(least=1, most=3, wait_s=5, idle_s=60)
END = Finished(reason="stop", usage=Usage(), timings=Timings())


# --- how many


@pytest.mark.parametrize(("text", "found"), [("1", (1, 1)), ("2..4", (2, 4)), ("3..3", (3, 3))])
def test_a_range_is_a_number_or_two(text, found):
    assert copies_range(text) == found


@pytest.mark.parametrize("text", ["", "0", "2..1", "1..", "..2", "1..65", "a..b", "1..2..3", "-1", "²"])
def test_what_is_no_range_is_refused_where_it_is_said(text, tmp_path):
    with pytest.raises(ValueError, match=r"MIN\.\.MAX"):
        copies_range(text)
    config = tmp_path / "config.toml"
    config.write_text(f'[serve]\ncopies = "{text}"\n')
    with pytest.raises(ConfigError, match=r"MIN\.\.MAX"):
        load_config(config)


def _seen(now: float, copies: int, waiting: int = 0, inside: int = 8) -> Seen:
    return Seen(now=now, copies=copies, waiting=waiting, oldest_s=waiting * 10, inside=inside, slots=8)


def test_growth_adds_a_copy_when_requests_wait_up_to_the_limits():
    growth = Growth(BOUNDS, cores=4)
    assert growth.look(_seen(0, copies=1, waiting=3)) == "grow"
    assert growth.reason == "requests waited longer than 5 s"
    assert growth.look(_seen(1, copies=3, waiting=3)) == "stay"
    assert growth.reason == "the most that may run"
    growth = Growth(BOUNDS, cores=2)
    assert growth.look(_seen(0, copies=2, waiting=3)) == "stay"
    assert growth.reason == "each has one core"


def test_growth_removes_a_copy_when_fewer_were_enough_for_idle_s():
    growth = Growth(BOUNDS, cores=4)
    assert {growth.look(_seen(n, copies=2, inside=3)) for n in range(50)} == {"stay"}
    assert {growth.look(_seen(n, copies=2, inside=9)) for n in range(50, 80)} == {"stay"}
    steps = [growth.look(_seen(n, copies=2)) for n in range(80, 141)]
    assert steps == ["stay"] * 60 + ["shrink"]
    assert {growth.look(_seen(n, copies=1, inside=0)) for n in range(200, 290)} == {"stay"}


# --- a request on its way


def _ticket(ended: list[str]) -> Ticket:
    return Ticket(
        GenerateRequest(prompt="x"), lambda _: ended.append("end"), lambda _: ended.append("lost")
    )


def test_what_waits_can_be_taken_back_and_what_has_begun_cannot():
    ended: list[str] = []
    ticket = _ticket(ended)
    cancelled: list[int] = []
    first = EventStream(lambda: cancelled.append(1))
    ticket.follow(first)
    first.put(Progress(0, 9, queued=True))
    assert ticket.is_waiting
    assert ticket.withdraw()
    first.put(END)  # of the cancelled one: nobody hears it
    second = EventStream(lambda: cancelled.append(2))
    second.put(Progress(0, 9, queued=True))
    second.put(TextDelta("a"))
    ticket.follow(second)
    assert not ticket.withdraw()
    second.put(END)
    assert [type(event).__name__ for event in ticket.stream] == [
        "Progress",
        "Progress",
        "TextDelta",
        "Finished",
    ]
    assert (ended, cancelled) == (["end"], [1])


def test_one_that_its_client_gave_up_between_two_copies_is_cancelled_in_the_second():
    ticket = _ticket([])
    first = EventStream(lambda: None)
    ticket.follow(first)
    assert ticket.withdraw()
    ticket.cancel()
    cancelled = threading.Event()
    ticket.follow(EventStream(cancelled.set))
    assert cancelled.is_set()


@pytest.mark.parametrize(("before", "said"), [((), ["lost"]), ((TextDelta("a"),), ["end"])])
def test_the_end_of_a_copy_loses_what_it_has_begun(before, said):
    ended: list[str] = []
    ticket = _ticket(ended)
    source = EventStream(lambda: None)
    ticket.follow(source)
    for event in (Progress(0, 9, queued=True), *before):
        source.put(event)
    source.put(EngineClosedError("it died"))
    assert ended == said
    if before:
        with pytest.raises(EngineClosedError):
            list(ticket.stream)


# --- several engines


class Shop:
    """Starts copies: scripted engines behind the sockets of workers, whose process can be ended."""

    def __init__(self, script=("a",), n_parallel: int = 2) -> None:
        self.info = msgspec.structs.replace(DEFAULT_INFO, n_parallel=n_parallel)
        self.script = script
        self.engines: list[FakeEngine] = []
        self.sockets: list[socket.socket] = []
        self.refusal: Exception | None = None
        self.heard: list[CopiesInfo] = []
        self.workers: list[threading.Thread] = []

    def start(self, first, n_threads: int) -> Copy:
        if self.refusal is not None:
            raise self.refusal
        engine = FakeEngine([self.script], info=self.info)
        engine.n_threads = n_threads
        self.engines.append(engine)
        here, there = socket.socketpair()
        self.sockets.append(there)
        worker = threading.Thread(
            target=serve, args=(there, Start(how="resumed"), lambda progress: engine), daemon=True
        )
        worker.start()
        self.workers.append(worker)
        return Copy(RemoteEngine(here), "resumed", n_threads)

    def kill(self, at: int) -> None:
        self.sockets[at].shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def open(self, least: int = 2, most: int = 2, cores: int = 4, **bounds) -> Iterator:
        minder = Minder(self.start, Bounds(least=least, most=most, **bounds), cores, self.heard.append)
        try:
            yield minder.engine
        finally:
            minder.engine.close()
            for worker in self.workers:
                worker.join(20)


def _until(condition, what: str) -> None:
    turns = threading.Event()
    for _ in range(4000):
        if condition():
            return
        turns.wait(0.005)
    pytest.fail(f"waited for {what}")


def _text(stream) -> str:
    return "".join(event.text for event in stream if isinstance(event, TextDelta))


def test_a_conversation_goes_where_it_was_read_and_others_where_least_is_to_do():
    shop = Shop()
    with shop.open() as engine:
        _until(lambda: len(engine.usable) == 2, "two copies")
        assert engine.info.n_parallel == 4
        _until(lambda: [fake.n_threads for fake in shop.engines] == [2, 2], "cores that are shared")
        gate = Gate(threading.Event())
        shop.engines[0]._choose = lambda request: (gate, "a")
        busy = engine.submit(GenerateRequest(prompt="one " * 400))
        assert gate.reached.wait(10)
        for n in range(3):  # the other copy has less to do
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
        assert [copy.number for copy in engine.copies().running] == [1, 2]


def test_the_end_of_one_ends_its_requests_alone_and_another_takes_its_place():
    gate = Gate(threading.Event())
    shop = Shop(script=("a", gate, "b"))
    with shop.open() as engine:
        _until(lambda: len(engine.usable) == 2, "two copies")
        streams = [engine.submit(GenerateRequest(prompt=str(n))) for n in range(2)]
        _until(lambda: all(fake.requests for fake in shop.engines), "a request in each")
        _until(lambda: not engine.waiting, "both to have begun")
        dead = 0 if shop.engines[0].requests[0].prompt == "0" else 1
        shop.kill(dead)
        with pytest.raises(EngineClosedError):
            list(streams[0])
        _until(lambda: len(engine.usable) == 2, "another copy")
        gate.opened.set()
        assert _text(streams[1]) == "ab"
        assert engine.copies().crashed_total == 1
        assert {copy.number for copy in engine.copies().running} == {1, 2, 3} - {dead + 1}
        assert engine.is_open
    assert [info.reason for info in shop.heard if "has ended" in info.reason]


def test_requests_wait_for_the_one_that_takes_the_place_of_the_last():
    shop = Shop()
    with shop.open(least=1, most=2) as engine:
        shop.kill(0)
        assert _text(engine.submit(GenerateRequest(prompt="x"))) == "a"
        shop.refusal = ModelLoadError("the file is gone")
        shop.kill(1)
        with pytest.raises(EngineClosedError):
            engine.submit(GenerateRequest(prompt="x"))
        assert not engine.is_open
        with pytest.raises(EngineClosedError):
            engine.tokenize("x")


def test_it_says_how_many_there_are_and_why():
    shop = Shop()
    with shop.open(least=1, most=2) as engine:
        assert engine.copies().words == "1 copy of 1 to 2: the least that may run"


def test_adapters_are_every_copys_and_that_of_one_that_comes():
    shop = Shop()
    with shop.open() as engine:
        _until(lambda: len(engine.usable) == 2, "two copies")
        red = Adapter("red", "/red.gguf", 0.5)
        assert engine.use_adapters([red]) == engine.info.lora == (red,)
        shop.kill(0)
        _until(lambda: len(shop.engines) == 3 and len(engine.usable) == 2, "another in its place")
        assert [fake.info.lora for fake in shop.engines[1:]] == [(red,), (red,)]
        assert engine.use_adapters([]) == engine.info.lora == ()
        assert [fake.info.lora for fake in shop.engines[1:]] == [(), ()]


def test_worker_whose_decode_loop_has_failed_ends() -> None:
    class Dead(FakeEngine):
        def health(self) -> str:
            return "the decode loop failed: MemoryError: no more"

    here, there = socket.socketpair()
    thread = threading.Thread(target=serve, args=(there, Start(), lambda progress: Dead()))
    thread.start()
    engine = RemoteEngine(here)
    assert engine.health() == ""
    with contextlib.suppress(EngineClosedError):
        list(engine.submit(GenerateRequest(prompt="x", max_tokens=1)))
    thread.join(30)
    assert not thread.is_alive()
    engine.close()
    assert "has ended" in engine.health()
