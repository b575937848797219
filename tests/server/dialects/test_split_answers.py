"""A stream adds up to the whole answer in every API, for 1,000 random splits into events."""

import json
import random

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine, split_script
from msgspec.structs import replace

from edgeinfer.runtime.events import ReasoningDelta, TextDelta, ToolCallDelta

pytestmark = pytest.mark.slow  # it sends hundreds of requests

HI = [{"role": "user", "content": "hi"}]
INFO = replace(DEFAULT_INFO, can_think=True)
WORDS = ["Hello", " ", "\n", "\n\n", "  ", "é", "你好", "👩\u200d🚀", "\t", "e\u0301"]
WORDS += ["**b**", "```", "<think>", "data: x", '{"a":1}']
SPLITS = 250  # for each of the four dialects


class Answer:
    """An answer that the engine generates as a whole, or in the pieces of the latest split."""

    def __init__(self):
        self.whole, self.pieces = [], []

    def make(self, dice, pause_s):
        def text():
            return "".join(dice.choices(WORDS, k=dice.randint(1, 12)))

        self.whole = [ReasoningDelta(text())] if dice.random() < 0.6 else []
        self.whole += [TextDelta(text())] if dice.random() < 0.9 or not self.whole else []
        for index in range(dice.choice([0, 0, 1, 2])):
            arguments = json.dumps({"x": text()})
            self.whole.append(ToolCallDelta(index, arguments, f"call_{index}", "f"))
        self.pieces = list(split_script(self.whole, dice, pause_s=pause_s))

    def play(self, request):
        return self.pieces or self.whole

    def expected_answer(self):
        """Return reasoning, text and calls."""
        thought = "".join(e.text for e in self.whole if isinstance(e, ReasoningDelta))
        text = "".join(e.text for e in self.whole if isinstance(e, TextDelta))
        calls = [json.loads(e.arguments) for e in self.whole if isinstance(e, ToolCallDelta)]
        return thought, text, calls


@pytest.fixture(scope="module")
def answer():
    return Answer()


@pytest.fixture(scope="module")
def engine(answer):
    return FakeEngine(answer.play, info=INFO)


def post(live_server, path, **body):
    return live_server.post(path, {"model": "fake", **body})


def read_chat(live_server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = post(live_server, "/v1/chat/completions", messages=HI, tools=tools).json()
    message = whole["choices"][0]["message"]
    chunks = live_server.events("/v1/chat/completions", {"messages": HI, "tools": tools})
    deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks if chunk["choices"]]
    calls = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            index = call["index"]
            calls[index] = calls.get(index, "") + call["function"]["arguments"]
    yield (
        message.get("reasoning_content") or "",
        message["content"] or "",
        [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()],
    )
    yield (
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        [json.loads(arguments) for arguments in calls.values()],
    )


def of_items(items):
    texts = {"reasoning": "", "message": ""}
    for item in items:
        for content_part in item.get("content") or ():
            texts[item["type"]] += content_part["text"]
    calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
    return texts["reasoning"], texts["message"], calls


def read_responses(live_server):
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}]}
    yield of_items(post(live_server, "/v1/responses", **body).json()["output"])
    events = live_server.events("/v1/responses", body)
    yield of_items(events[-1][1]["response"]["output"])
    deltas = {"reasoning_text": "", "output_text": ""}
    calls = {}
    for name, data in events:
        kind = name.removeprefix("response.").removesuffix(".delta")
        if name.endswith("function_call_arguments.delta"):
            calls[data["item_id"]] = calls.get(data["item_id"], "") + data["delta"]
        elif name.endswith(".delta"):
            deltas[kind] += data["delta"]
    yield deltas["reasoning_text"], deltas["output_text"], [json.loads(call) for call in calls.values()]


def of_blocks(blocks):
    texts = {"thinking": "", "text": ""}
    for block in blocks:
        if block["type"] in texts:
            texts[block["type"]] += block[block["type"]]
    calls = [block["input"] for block in blocks if block["type"] == "tool_use"]
    return texts["thinking"], texts["text"], calls


def read_anthropic(live_server):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"messages": HI, "max_tokens": 100_000, "tools": tools}
    body["thinking"] = {"type": "enabled", "budget_tokens": 50_000}
    yield of_blocks(post(live_server, "/v1/messages", **body).json()["content"])
    blocks = {}
    for name, data in live_server.events("/v1/messages", {"model": "fake", **body}):
        if name == "content_block_start":
            blocks[data["index"]] = {**data["content_block"], "json": ""}
        if name == "content_block_delta":
            block = blocks[data["index"]]
            for field, of in (("thinking", "thinking"), ("text", "text"), ("partial_json", "json")):
                block[of] = block.get(of, "") + data["delta"].get(field, "")
    for block in blocks.values():
        block["input"] = json.loads(block["json"] or "{}")
    yield of_blocks(blocks.values())


def of_messages(messages):
    calls = [call["function"]["arguments"] for m in messages for call in m.get("tool_calls") or ()]
    thought = "".join(m.get("thinking") or "" for m in messages)
    return thought, "".join(m["content"] for m in messages), calls


def read_ollama(live_server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "tools": tools, "think": True}
    yield of_messages([post(live_server, "/api/chat", stream=False, **body).json()["message"]])
    lines = post(live_server, "/api/chat", **body).text.splitlines()
    yield of_messages([json.loads(line)["message"] for line in lines])


@pytest.mark.parametrize("read", [read_chat, read_responses, read_anthropic, read_ollama])
def test_stream_adds_up_to_the_whole_answer_for_any_split(live_server, answer, read, cases):
    for seed in range(cases(SPLITS)):
        answer.make(random.Random(f"{read.__name__} {seed}"), 0.02 if seed % 25 == 0 else 0.0)
        for got in read(live_server):
            assert got == answer.expected_answer(), seed
    assert '"level":"error"' not in live_server.log.getvalue()
