"""The scripted engine does what its script says."""

from __future__ import annotations

import threading

import pytest

from edgeinfer.errors import DecodeError, QueueFullError
from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.runtime.fake import Delay, FakeEngine, Gate
from edgeinfer.runtime.requests import GenerateRequest

ASK = GenerateRequest(prompt="hi")


def texts(events: list[object]) -> list[str]:
    return [e.text for e in events if isinstance(e, TextDelta)]


def test_scripts_are_played_in_order_and_the_last_again() -> None:
    engine = FakeEngine([["a", "b"], ["c"]])
    assert [texts(list(engine.submit(ASK))) for _ in range(3)] == [["a", "b"], ["c"], ["c"]]
    assert engine.requests == [ASK] * 3


def test_a_function_chooses_by_request() -> None:
    engine = FakeEngine(lambda request: [str(request.prompt).upper()])
    assert texts(list(engine.submit(ASK))) == ["HI"]


def test_events_pass_as_they_are() -> None:
    call = ToolCallDelta(0, "{}", id="1", name="f")
    events = list(FakeEngine([[ReasoningDelta("hm"), call, TextDelta("x")]]).submit(ASK))
    assert call in events
    assert ReasoningDelta("hm") in events
    assert isinstance(events[-1], Finished)


def test_error_is_raised_after_earlier_events() -> None:
    generation = iter(FakeEngine([["a", DecodeError("broken"), "never"]]).submit(ASK))
    seen: list[object] = []
    with pytest.raises(DecodeError):
        seen.extend(generation)
    assert texts(seen) == ["a"]


def test_a_gate_holds_the_script_until_it_is_opened() -> None:
    gate = Gate(threading.Event())
    engine = FakeEngine([["a", gate, "b"]])
    generation = engine.submit(ASK)
    assert gate.reached.wait(10)
    assert engine.metrics().running == 1
    gate.opened.set()
    assert texts(list(generation)) == ["a", "b"]
    assert engine.metrics().running == 0


def test_cancel_opens_gates_and_cuts_delays() -> None:
    gate = Gate(threading.Event())
    generation = FakeEngine([[gate, Delay(3600), "never"]]).submit(ASK)
    assert gate.reached.wait(10)
    generation.cancel()
    events = list(generation)
    assert texts(events) == []
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "cancelled"


def test_a_full_queue_refuses() -> None:
    gate = Gate(threading.Event())
    engine = FakeEngine([[gate]], max_inside=1)
    first = engine.submit(ASK)
    with pytest.raises(QueueFullError):
        engine.submit(ASK)
    gate.opened.set()
    list(first)
    list(engine.submit(ASK))


def test_rerank_prefers_shared_words() -> None:
    low, high = FakeEngine().rerank("red cat", ["a dog", "the red cat"])
    assert high > low
