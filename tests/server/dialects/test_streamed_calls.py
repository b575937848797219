"""A client gets the arguments of a tool call while the model writes them, in every notation and API."""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, StepGate
from least_requests import HI

from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES
from edgeinfer.runtime.chat_format.tool_call_grammar import write_call
from edgeinfer.runtime.events import Finished, Timings, ToolCallDelta, Usage

TEXT = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"path": TEXT, "content": TEXT}, "required": ["path"]}
ARGUMENTS = {"path": "notes.md", "content": "a long text\n" * 40}
FUNCTION = {"name": "write_file", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 900,
        "tools": [{"name": "write_file", "input_schema": SCHEMA}],
    },
}
NOTATIONS = sorted(set(FAMILIES) - {"generic"})


def fed(family: str) -> list[tuple[str, list[Any]]]:
    """Feed a call to the parser by characters; return (character, its events), "" for the end."""
    parser = AnswerParser(FAMILIES[family], {"write_file": SCHEMA}, constrained=True)
    text = write_call(FAMILIES[family], "write_file", json.dumps(ARGUMENTS))
    return [*((c, list(parser.feed(c))) for c in text), ("", list(parser.finish()))]


def position(family: str) -> int:
    """Return the index of the first value's first character."""
    return "".join(character for character, _ in fed(family)).index("notes.md")


def arguments_in(path: str, line: str) -> str:
    """Return the text of the arguments in one event."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    if path == "/v1/messages":
        return event.get("delta", {}).get("partial_json", "")
    if path == "/v1/responses":
        is_delta = event["type"] == "response.function_call_arguments.delta"
        return event["delta"] if is_delta else ""
    calls = [call for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    return "".join(call["function"].get("arguments") or "" for call in calls)


@pytest.mark.parametrize("family", NOTATIONS)
def test_each_character_of_a_value_is_an_event_at_once(family):
    pieces = fed(family)
    start = position(family)
    for character, events in pieces[start : start + len("notes.md")]:
        assert [event.arguments[-1] for event in events] == [character]
    sent = "".join(event.arguments for _, events in pieces for event in events)
    assert json.loads(sent) == ARGUMENTS


@pytest.mark.parametrize("family", NOTATIONS)
@pytest.mark.parametrize("path", BODIES)
def test_client_has_the_arguments_begun_while_the_model_writes(serve, path, family):
    gate = StepGate()
    pieces, start = fed(family), position(family) + len("notes")
    halves = (pieces[:start], pieces[start:])
    before, after = ([event for _, events in half for event in events] for half in halves)
    assert all(isinstance(event, ToolCallDelta) for event in (*before, *after))
    finished = Finished(reason="tool_calls", usage=Usage(), timings=Timings())
    script: Script = [*before, gate, *after, finished]
    endpoint = serve(FakeEngine([script]))
    with endpoint.client.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
        lines, sent = answer.iter_lines(), ""
        while "notes" not in sent:  # the engine waits at the gate: what it generated must arrive
            sent += arguments_in(path, next(lines))
        assert not gate.opened.is_set()
        gate.opened.set()
        sent += "".join(arguments_in(path, line) for line in lines)
    assert json.loads(sent) == ARGUMENTS
