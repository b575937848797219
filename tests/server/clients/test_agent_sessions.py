"""An agent's session of 40 tool calls in the format of Qwen3-Coder, one of them cut in the middle.

The answers are scripted; chat templates, grammars and parsers are the real ones.
"""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine, Script
from made_formats import json_or_text, load_format

from edgeinfer.runtime.chat_format.chat_format import ChatFormat
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES
from edgeinfer.runtime.chat_format.tool_call_grammar import write_call
from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.runtime.requests import GenerateRequest

N_TURNS, CUT_AT = 40, 17
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "line": {"type": "integer"},
    },
    "required": ["path", "content"],
}
#: A schema that no grammar enforces. It is reported as ignored.
ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def arguments(turn: int) -> dict[str, Any]:
    shown = write_call(FAMILIES["qwen-xml"], "write_file", '{"path": "/etc/x", "content": "y"}')
    content = [f"line {turn}", f"# how to call\n{shown}\n", "ends with </tool_call>", None][turn % 4]
    return {"path": f"f{turn}.md", "content": content, "line": turn}


class ScriptedModel:
    """Answers each turn with a tool call; the one in turn `CUT_AT` is cut in the middle."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self.prompts: list[str] = []

    def __call__(self, request: GenerateRequest) -> Script:
        turn = len(self.prompts)
        prepared = self._format.process(request)
        assert prepared.parser is not None
        self.prompts.append(prepared.prompt)
        values = {k: "null" if v is None else v for k, v in arguments(turn).items()}
        text = write_call(FAMILIES["qwen-xml"], "write_file", json.dumps(values))
        if self._format.can_think:
            text = "I write." + ("" if turn % 2 else "</think>") + "\n\n" + text
        is_cut = turn == CUT_AT
        text = text[: text.index("</parameter>", text.index("<parameter=content>"))] if is_cut else text
        pieces = [text[offset : offset + 5] for offset in range(0, len(text), 5)]
        events = [event for piece in pieces for event in prepared.parser.feed(piece)]
        events += prepared.parser.finish(cut=is_cut)
        reason = "length" if is_cut else "tool_calls"
        return [*events, Finished(reason=reason, usage=Usage(), timings=Timings())]


@pytest.fixture(params=["qwen_xml", "qwen35"])
def model(request) -> ScriptedModel:
    return ScriptedModel(load_format(request.param))


def check(turn: int, passed: Any, prompts: list[str]) -> str:
    """Compare a call's arguments with the scripted ones; return the tool's result."""
    assert len(prompts) == turn + 1
    if turn:
        assert ("no JSON" if turn - 1 == CUT_AT else f"written {turn - 1}") in prompts[-1]
    if turn == CUT_AT:
        assert passed != arguments(turn)
        return "no JSON"
    assert passed == arguments(turn)
    return f"written {turn}"


def test_openai_session_continues_after_a_broken_call(serve, model, openai):
    live_server = serve(FakeEngine(model))
    schemas = {"odd": ODD, "write_file": PARAMETERS}
    functions = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [{"role": "user", "content": "Write the files."}]
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(N_TURNS):
            raw = client.chat.completions.with_raw_response.create(
                model="fake", messages=messages, tools=tools, stream=True
            )
            call: dict[str, Any] = {"type": "function", "function": {"name": "", "arguments": ""}}
            for chunk in raw.parse():
                for delta in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                    call["id"] = call.get("id") or delta.id
                    call["function"]["name"] += delta.function.name or ""
                    call["function"]["arguments"] += delta.function.arguments or ""
            result = check(turn, json_or_text(call["function"]["arguments"]), model.prompts)
            ignored = raw.headers["x-edgeinfer-ignored"]
            assert "tools[0].parameters#/properties/a/uniqueItems" in ignored
            assert ("tool_calls[0].arguments" in ignored) is (turn > CUT_AT)
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]


def test_responses_session_continues_after_a_broken_call(serve, model, openai):
    live_server = serve(FakeEngine(model))
    tool = {"type": "function", "name": "write_file", "parameters": PARAMETERS, "strict": False}
    items: list[Any] = [{"role": "user", "content": "Write the files."}]
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(N_TURNS):
            with client.responses.stream(model="fake", input=items, tools=[tool]) as stream:
                done = [event.item for event in stream if event.type == "response.output_item.done"]
            call = done[-1]
            assert call.status == ("incomplete" if turn == CUT_AT else "completed")
            result = check(turn, json_or_text(call.arguments), model.prompts)
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in done]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def test_anthropic_session_continues_after_a_broken_call(serve, model, anthropic):
    live_server = serve(FakeEngine(model))
    tool = {"name": "write_file", "input_schema": PARAMETERS}
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 500, "tools": [tool], "stream": False}
    messages: list[Any] = [{"role": "user", "content": "Write the files."}]
    with anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as client:
        for turn in range(N_TURNS):
            answer = client.messages.create(messages=messages, **asked)
            (call,) = [block for block in answer.content if block.type == "tool_use"]
            result = check(turn, call.input, model.prompts)
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": content})
            told = {"type": "tool_result", "tool_use_id": call.id, "content": result}
            messages.append({"role": "user", "content": [told]})
