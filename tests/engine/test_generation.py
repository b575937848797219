"""The parts of an answer, put together from the events of a generation."""

from edgeinfer.runtime.events import (
    Finished,
    Logprob,
    Progress,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.generation import Collected


def test_every_kind_of_event_has_its_part() -> None:
    chosen = TokenLogprobs(Logprob(1, b"b", -0.5))
    end = Finished(reason="tool_calls", usage=Usage(), timings=Timings())
    collected = Collected("a", "why ")
    for event in (
        Progress(3, 9),
        ReasoningDelta("not"),
        TextDelta("b", (chosen,)),
        ToolCallDelta(0, id="c1", name="f"),
        ToolCallDelta(0, '{"x":'),
        ToolCallDelta(1, "{}", id="c2", name="g"),
        ToolCallDelta(0, "1}"),
        end,
    ):
        collected.add(event)
    assert (collected.text, collected.reasoning) == ("ab", "why not")
    calls = [(call.id, call.name, call.arguments) for call in collected.calls.values()]
    assert calls == [("c1", "f", '{"x":1}'), ("c2", "g", "{}")]
    assert collected.logprobs == [chosen]
    assert collected.progress == Progress(3, 9)
    assert collected.finished is end
