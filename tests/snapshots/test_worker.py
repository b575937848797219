"""A remote engine behaves like the engine in its worker, and reports the worker's end."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.errors import EngineClosedError, EngineError
from edgeinfer.host import ProcessStart
from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta
from edgeinfer.runtime.options import Adapter
from edgeinfer.runtime.requests import Choice, GenerateRequest, Message
from edgeinfer.workers.remote_engine import RemoteEngine, serve_engine


@contextlib.contextmanager
def remote(engine, progress=None):
    live_server, worker_end = socket.socketpair()

    def load(report):
        report("load", 0.5)
        return engine, ProcessStart(how="resumed", snapshot="fake")

    worker = threading.Thread(target=serve_engine, args=(worker_end, load))
    worker.start()
    remote_engine = RemoteEngine(live_server, progress)
    try:
        yield remote_engine, worker_end
    finally:
        remote_engine.close()
        worker.join(60)
        assert not worker.is_alive()


def ask(text="hi", **fields) -> GenerateRequest:
    return GenerateRequest(prompt=text, **fields)


def test_info_start_and_progress_come_through():
    heard = []
    with remote(FakeEngine(), lambda *stage: heard.append(stage)) as (engine, _):
        assert (engine.info.model, engine.start.snapshot) == ("fake", "fake")
    assert heard == [("load", 0.5)]


def test_a_request_s_reasoning_budget_comes_through():
    script = (ReasoningDelta("one "), ReasoningDelta("two "), "answer")
    messages = (Message(role="user", content="hi"),)
    with remote(FakeEngine([script])) as (engine, _):
        events = list(engine.submit(GenerateRequest(messages=messages, reasoning_budget=1)))
    assert [e.text for e in events if isinstance(e, ReasoningDelta)] == ["one "]
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["answer"]


def test_calls_answer_as_the_engine_does():
    fake = FakeEngine()
    with remote(fake) as (engine, _):
        conversation = GenerateRequest(
            messages=(Message(role="user", content="hi"),), template_options={"enable_thinking": False}
        )
        assert engine.tokenize_chat(conversation) == fake.tokenize_chat(conversation)
        assert engine.rerank("q", ["a", "b"]) == fake.rerank("q", ["a", "b"])


def test_the_death_of_the_worker_ends_everything_in_flight():
    gate = StepGate(threading.Event())
    with remote(FakeEngine([("a", gate)])) as (engine, worker_end):
        generation = iter(engine.submit(ask()))
        assert gate.reached.wait(60)
        worker_end.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EngineClosedError):
            list(generation)
        with pytest.raises(EngineClosedError):
            engine.submit(ask())
        with pytest.raises(EngineClosedError):
            engine.tokenize("x")
        gate.opened.set()


def test_closing_waits_until_the_worker_has_closed_its_engine():
    """Wait, because the next process reads the prefixes that the engine writes as it closes."""
    fake = FakeEngine([("a", StepGate(threading.Event()))])
    with remote(fake) as (engine, _):
        generation = engine.submit(ask())
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(60)
        assert not fake.is_open
        with contextlib.suppress(EngineClosedError):  # otherwise the stream ended as cancelled
            list(generation)


def test_a_worker_that_dies_before_it_is_ready():
    live_server, worker_end = socket.socketpair()
    worker_end.close()
    with pytest.raises(EngineClosedError):
        RemoteEngine(live_server)
    assert live_server.fileno() == -1


def test_adapters_are_the_workers_and_known_here():
    with remote(FakeEngine()) as (engine, _):
        red = Adapter("red", "/red.gguf", 0.5)
        assert engine.use_adapters([red]) == engine.info.lora == (red,)
        assert engine.use_adapters([]) == engine.info.lora == ()


class _Slow(FakeEngine):
    """An engine that accepts a request with a schema only once `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.opened = threading.Event(), threading.Event()

    def submit(self, request):
        if request.constraint is not None:
            self.inside.set()
            assert self.opened.wait(60)
        return super().submit(request)


def test_request_that_is_made_ready_stops_no_other():
    fake = _Slow()
    with remote(fake) as (engine, _), ThreadPoolExecutor(1) as pool:
        slow = pool.submit(engine.submit, ask(constraint=Choice(("a", "b"))))
        assert fake.inside.wait(60)
        assert "".join(event.text for event in engine.submit(ask()) if isinstance(event, TextDelta))
        fake.opened.set()
        assert isinstance(list(slow.result(60))[-1], Finished)


def test_defect_of_a_worker_reaches_the_caller():
    class Broken(FakeEngine):
        def submit(self, request):
            raise ZeroDivisionError

        def detokenize(self, tokens):
            raise ZeroDivisionError

    with remote(Broken()) as (engine, _):
        for ask_it in (lambda: engine.submit(ask()), lambda: engine.detokenize([1])):
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                ask_it()
