"""`functions` and `function_call` of chat completions, from before there were tools."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from edgeinfer.runtime.events import Finished, Timings, ToolCallDelta, Usage
from edgeinfer.runtime.fake import FakeEngine

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL = [
    ToolCallDelta(0, "", "call_1", "add"),
    ToolCallDelta(0, '{"a": 1}'),
    Finished(reason="tool_calls", usage=Usage(), timings=Timings()),
]
HI = {"role": "user", "content": "hi"}


@pytest.fixture
def ask(serve):
    """Ask an endpoint that calls, with the official client."""
    engine = FakeEngine([CALL])
    with openai.OpenAI(base_url=f"{serve(engine).url}/v1", api_key="none") as client:

        def asking(**fields):
            fields = {"messages": [HI], "functions": [ADD]} | fields
            create: Any = client.chat.completions.create  # the fields come from a table
            return create(model="fake", **fields)

        asking.engine = engine  # type: ignore[attr-defined]
        yield asking


def test_a_call_is_told_as_a_function_call(ask):
    choice = ask(function_call={"name": "add"}).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == (
        "add",
        '{"a": 1}',
    )
    (request,) = ask.engine.requests
    assert [tool.name for tool in request.tools] == ["add"]
    assert (request.tool_choice.name, request.tool_choice.parallel) == ("add", False)


def test_a_call_is_streamed_as_a_function_call(ask):
    choices = [chunk.choices[0] for chunk in ask(stream=True)]
    calls = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert calls[0].name == "add"
    assert "".join(call.arguments or "" for call in calls) == '{"a": 1}'
    assert choices[-1].finish_reason == "function_call"


def test_a_functions_answer_belongs_to_its_call(ask):
    called = {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}
    ask(messages=[HI, called, {"role": "function", "name": "add", "content": "3"}])
    turns = ask.engine.requests[0].messages
    assert turns[1].tool_calls[0].id == turns[2].tool_call_id
    assert (turns[2].role, turns[2].content) == ("tool", "3")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": ADD}]}, "functions"),
        ({"messages": [HI, {"role": "function", "name": "add", "content": "3"}]}, "messages[1]"),
        ({"functions": None, "function_call": {"name": "add"}}, "function_call"),
    ],
)
def test_what_means_nothing_is_refused(ask, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(**fields)
    assert refused.value.param == param
