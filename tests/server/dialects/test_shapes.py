"""Responses of each route to scripted events: reasoning, tool calls, stops, several answers, errors."""

from typing import Any

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from least_requests import EVERY, HI
from msgspec.structs import replace

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.events import (
    Finished,
    Logprob,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.requests import Sampling

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CALLS = [
    ReasoningDelta("let me "),
    ReasoningDelta("see"),
    TextDelta("I will call."),
    ToolCallDelta(0, id="call_a", name="f"),
    ToolCallDelta(0, arguments='{"x":'),
    ToolCallDelta(0, arguments="1}"),
    ToolCallDelta(1, id="call_b", name="g", arguments="{}"),
    Finished(
        reason="tool_calls",
        usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=7, reasoning_tokens=2),
        timings=Timings(ttft_ms=2, prefill_ms=2, decode_ms=12),
    ),
]


def test_chat_reasoning_and_parallel_calls_whole(serve):
    message = serve(FakeEngine([CALLS])).chat(tools=TOOLS).json()
    (choice,) = message["choices"]
    assert choice["message"]["reasoning_content"] == "let me see"
    assert choice["message"]["content"] == "I will call."
    assert [(c["id"], c["function"]) for c in choice["message"]["tool_calls"]] == [
        ("call_a", {"name": "f", "arguments": '{"x":1}'}),
        ("call_b", {"name": "g", "arguments": "{}"}),
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert message["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert message["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert message["timings"]["prompt_n"] == 5
    assert message["timings"]["predicted_per_second"] == 500.0


def test_chat_calls_stream_with_id_and_name_first(serve):
    live_server = serve(FakeEngine([CALLS]))
    assert live_server.chat(tools=TOOLS, stream=True).text.endswith("data: [DONE]\n\n")
    chunks = live_server.events(CHAT, {"messages": HI, "tools": TOOLS})
    deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    function = {"name": "f", "arguments": ""}
    assert calls[0] == {"index": 0, "id": "call_a", "type": "function", "function": function}
    assert calls[1] == {"index": 0, "function": {"arguments": '{"x":'}}
    assert calls[3]["id"] == "call_b"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "let me see"


def test_answer_with_only_tool_calls_has_null_content(serve):
    script = [ToolCallDelta(0, id="c", name="f", arguments="{}"), CALLS[-1]]
    (choice,) = serve(FakeEngine([script])).chat(tools=TOOLS).json()["choices"]
    assert choice["message"]["content"] is None


def test_n_answers_count_the_prompt_once_and_seeds_up(serve):
    engine = FakeEngine([["a"], ["b", "c"]])
    body = serve(engine).chat(n=2, seed=5).json()
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert [r.sampling.seed for r in engine.requests] == [5, 6]
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_minus_one_token_is_no_limit_and_whole_floats_are_integers(live_server, engine):
    assert live_server.chat(max_tokens=-1, max_completion_tokens=7.0).status_code == 200
    assert live_server.chat(max_tokens=-1, seed=3.0).status_code == 200
    assert engine.requests[-1].sampling.seed == 3
    live_server.post("/v1/completions", {"prompt": "p", "max_tokens": -1}, status=200)
    assert [request.max_tokens for request in engine.requests[-3:]] == [7, None, None]
    assert live_server.chat(max_tokens=2.5).json()["error"]["param"] == "max_tokens"


def test_as_many_stop_strings_as_autocompletion_sends_reach_the_engine(live_server, engine):
    stops = [f"<{number}>" for number in range(128)]
    assert live_server.chat(stop=stops).status_code == 200
    generate = EVERY["/api/generate"] | {"options": {"stop": stops}}
    assert live_server.post("/api/generate", generate).status_code == 200
    assert [request.stop for request in engine.requests[-2:]] == [tuple(stops)] * 2


def test_chunks_of_several_answers_have_indexes_and_usage_is_last(serve):
    live_server = serve(FakeEngine([["a"], ["b", "c"], ["d"]]))
    ask = {"messages": HI, "n": 3, "stream_options": {"include_usage": True}}
    chunks = [chunk for _, chunk in live_server.events(CHAT, ask)]
    said = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
    assert sorted(said.values()) == ["a", "bc", "d"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_logprobs_survive_torn_characters_and_minus_infinity(serve):
    torn = TokenLogprobs(Logprob(1, b"\xc3", float("-inf")), (Logprob(2, b"a", -0.5),))
    body = serve(FakeEngine([[TextDelta("é", (torn,))]])).chat(logprobs=True, top_logprobs=1).json()
    (token,) = body["choices"][0]["logprobs"]["content"]
    assert token.pop("top_logprobs") == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert token == {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -9999.0, "bytes": [0xC3]}


def test_completions_keep_prompts_in_order_with_echo(serve):
    engine = FakeEngine(lambda request: [f"<{request.prompt}>"])
    body = {"prompt": ["p", "q"], "n": 2, "echo": True}
    reply = serve(engine).client.post("/v1/completions", json=body).json()
    assert [c["text"] for c in reply["choices"]] == ["p<p>", "p<p>", "q<q>", "q<q>"]
    assert reply["usage"] == reply["usage"] | {"prompt_tokens": 2, "completion_tokens": 4}


def test_completions_logprobs_have_offsets(serve):
    other = (Logprob(2, b"z", -2.0),)
    logprobs = [TokenLogprobs(Logprob(1, text, -1.0), other) for text in (b"ab", b"c")]
    tokens = [TextDelta(entry.chosen.piece.decode(), (entry,)) for entry in logprobs]
    live_server = serve(FakeEngine([tokens]))
    ask = {"prompt": "p", "logprobs": 1}
    (whole,) = live_server.post("/v1/completions", ask).json()["choices"]
    expected = {"tokens": ["ab", "c"], "token_logprobs": [-1.0, -1.0], "text_offset": [0, 2]}
    assert whole["logprobs"] == expected | {"top_logprobs": [{"z": -2.0}] * 2}
    chunks = live_server.events("/v1/completions", ask)
    streamed = [chunk["choices"][0]["logprobs"] or {} for _, chunk in chunks]
    assert [offset for event in streamed for offset in event.get("text_offset", [])] == [0, 2]


def test_message_stream_opens_one_block_at_a_time(serve):
    live_server = serve(FakeEngine([CALLS]))
    body = {"max_tokens": 9, "messages": HI, "tools": [{"name": "f", "input_schema": {}}]}
    events = live_server.events("/v1/messages", body)
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    open_block = None
    kinds = []
    for name, data in events:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
            kinds.append(data["content_block"]["type"])
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["cache_read_input_tokens"] == 4
    message = live_server.post("/v1/messages", body).json()
    assert [b["type"] for b in message["content"]] == kinds
    assert message["content"][2]["input"] == {"x": 1}
    usage = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 7}
    assert message["usage"].items() >= usage.items()


@pytest.mark.parametrize(
    ("stopped_by", "reason", "told"),
    [("END", "stop_sequence", "END"), ("<|im_end|>", "end_turn", None)],
)
def test_only_the_requests_own_stop_strings_are_stop_sequences(serve, stopped_by, reason, told):
    finished = Finished(reason="stop", usage=Usage(), timings=Timings(), stop_sequence=stopped_by)
    live_server = serve(FakeEngine([["x", finished]]))
    body = {"max_tokens": 9, "messages": HI, "stop_sequences": ["END"]}
    message = live_server.post("/v1/messages", body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, told)


def test_a_response_stream_announces_and_closes_every_item(serve):
    live_server = serve(FakeEngine([CALLS]))
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}]}
    events = live_server.events("/v1/responses", body)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    added = [data["item"]["type"] for name, data in events if name == "response.output_item.added"]
    done = [data["item"]["type"] for name, data in events if name == "response.output_item.done"]
    assert added == done == ["reasoning", "message", "function_call", "function_call"]
    final = events[-1][1]["response"]
    assert events[-1][0] == "response.completed"
    assert [item["type"] for item in final["output"]] == added
    assert final["output"][2]["arguments"] == '{"x":1}'


def test_a_response_item_after_a_call_has_only_its_own_text(serve):
    call = ToolCallDelta(0, id="a", name="f", arguments="{}")
    events = [TextDelta("First. "), call, TextDelta("Then.")]
    live_server = serve(FakeEngine([events]))
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}]}
    streamed = live_server.events("/v1/responses", body)
    done = [data["text"] for name, data in streamed if name == "response.output_text.done"]
    items = streamed[-1][1]["response"]["output"]
    texts = [content["text"] for item in items for content in item.get("content", ())]
    assert done == texts == ["First. ", "Then."]


def test_a_response_cut_short_is_incomplete(serve):
    live_server = serve(FakeEngine([["a", "b", "c"]]))
    body = {"input": "hi", "max_output_tokens": 2}
    reply = live_server.post("/v1/responses", body).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    events = live_server.events("/v1/responses", body)
    assert events[-1][0] == "response.incomplete"
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    assert done[-1]["status"] == "incomplete"


def _text(text: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


CALL = {"name": "f", "arguments": '{"a":1}'}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": _text("sun")}
#: One conversation in each API.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [{"id": "t", "function": CALL}]},
            {"role": "tool", "tool_call_id": "t", "content": "sun"},
            {"role": "user", "content": "so?"},
        ]
    },
    "/v1/messages": {
        "max_tokens": 1,
        "system": _text("S"),
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, *_text("I look."), {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
            },
            {"role": "user", "content": [RESULT, *_text("so?")]},
        ],
    },
    "/v1/responses": {
        "instructions": "S",
        "input": [
            {"role": "user", "content": _text("weather?", "input_text")},
            {"type": "reasoning", "id": "rs", "summary": [], "content": _text("hm", "reasoning_text")},
            {"type": "message", "role": "assistant", "content": _text("I look.", "output_text")},
            {"type": "function_call", "call_id": "t", **CALL},
            {"type": "function_call_output", "call_id": "t", "output": "sun"},
            {"role": "user", "content": "so?"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_conversation_reaches_the_engine_as_the_same_turns(live_server, engine, path):
    assert live_server.post(path, CONVERSATIONS[path]).status_code == 200
    turns = engine.requests[-1].messages
    assert [(turn.role, turn.content, turn.reasoning) for turn in turns] == [
        ("system", "S", ""),
        ("user", "weather?", ""),
        ("assistant", "I look.", "hm"),
        ("tool", "sun", ""),
        ("user", "so?", ""),
    ]
    (call,) = turns[2].tool_calls
    assert (call.id, call.name, call.arguments, turns[3].tool_call_id) == ("t", "f", '{"a":1}', "t")


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/v1/chat/completions", '\ndata: {"error":{"message":"boom"'),
        ("/v1/completions", '\ndata: {"error":{"message":"boom"'),
        ("/v1/messages", "\nevent: error"),
        ("/v1/responses", "\nevent: response.failed"),
        ("/api/chat", '\n{"error":"boom"}\n'),
        ("/completion", '\ndata: {"error":{"message":"boom"'),
    ],
)
def test_failure_ends_a_stream_with_an_error_event_and_is_a_500_otherwise(serve, path, sign):
    body, failing = EVERY[path], ["part", DecodeError("boom")]
    live_server = serve(FakeEngine([failing, failing, ["fine"]]))
    text = live_server.post(path, body | {"stream": True}).text
    assert "part" in text
    assert sign in text
    assert live_server.post(path, body).status_code == 500
    assert live_server.post(path, body).status_code == 200


@pytest.mark.parametrize(
    ("chosen", "penalties"),
    [
        ({}, (0.4, 1.1)),
        ({"seed": 3}, (0.4, 1.1)),
        ({"temperature": 0}, (0, 1)),
        ({"top_p": 0.5, "dry_multiplier": 1}, (1, 1)),
    ],
)
def test_request_with_sampling_options_drops_default_penalties(serve, chosen, penalties):
    defaults = Sampling(dry_multiplier=0.4, repeat_penalty=1.1)
    engine = FakeEngine(info=replace(DEFAULT_INFO, sampling=defaults))
    serve(engine).chat(**chosen)
    sampling = engine.requests[0].sampling
    assert (sampling.dry_multiplier, sampling.repeat_penalty) == penalties


def test_sampling_reaches_the_engine_over_the_models_defaults(live_server, engine):
    live_server.chat(
        top_k=3,
        min_p=0.1,
        dry_multiplier=0.8,
        logit_bias={"7": -100},
        seed=-1,
        stop="x",
        overflow="shift",
        deadline_s=9,
        ignore_eos=True,
        cache_prompt=False,
    )
    request = engine.requests[-1]
    s = request.sampling
    assert (s.top_k, s.min_p, s.dry_multiplier) == (3, 0.1, 0.8)
    assert (s.logit_bias, s.seed) == ({7: -100.0}, None)
    assert s.temperature == engine.info.sampling.temperature
    assert (request.stop, request.overflow, request.deadline_s) == (("x",), "shift", 9)
    assert (request.ignore_eos, request.cache_prompt) == (True, False)


def test_infer_answers_from_query_and_body(serve):
    client = serve(FakeEngine([["forty-two"]])).client
    assert client.get("/infer", params={"prompt": "6*7"}).json()["result"] == "forty-two"
    assert client.post("/infer?prompt=6*7").json()["result"] == "forty-two"
    assert client.post("/infer", json={"prompt": "6*7"}).json()["result"] == "forty-two"


def test_tokens_and_counts(live_server):
    client = live_server.client
    assert client.post("/tokenize", json={"content": "hé"}).json() == {"tokens": [104, 195, 169]}
    pieces = client.post("/tokenize", json={"content": "é", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert client.post("/detokenize", json={"tokens": [104, 105]}).json()["content"] == "hi"
    assert client.post("/detokenize", json={"tokens": [70_000]}).json()["error"]["param"] == "tokens"
    assert client.get("/props").json()["chat_template"] == "{{ messages }}"
    count = client.post("/v1/messages/count_tokens", json={"messages": HI}).json()
    assert count == {"input_tokens": len("user: hi\nassistant:")}


def test_embedding_has_the_models_dimensions(live_server):
    (embedding,) = live_server.post("/v1/embeddings", {"input": "x", "dimensions": 8}).json()["data"]
    assert len(embedding["embedding"]) == 8
