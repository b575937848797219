"""Fields without effect on the answer are ignored and named; requests of real agents are answered."""

import json

import pytest
from fake_engine import FakeEngine
from least_requests import EVERY, HI

from edgeinfer.runtime.events import ToolCallDelta

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {}}
CACHED = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
EAGER = {"name": "a", "input_schema": SCHEMA, "eager_input_streaming": True}
SEARCHED = [{"type": "web_search_call", "id": "1"}, {"role": "user", "content": "x"}]


def _ignored_fields(answer) -> list[str]:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-edgeinfer-ignored", "").split(", ")


#: (route, additional fields, the ignored field that is named)
TAKEN = [
    (CHAT, {"metadata": {"a": "b"}}, "metadata"),
    (CHAT, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"mirostat": 2, "typical_p": 0.9}, "mirostat, typical_p"),
    ("/completion", {"mirostat_tau": 5.0, "mirostat_eta": 0.1}, "mirostat_tau, mirostat_eta"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[]=custom"),
    (CHAT, {"messages": [{"role": "user", "content": CACHED}]}, "messages[].content[].cache_control"),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include=reasoning.encrypted_content"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[]=web_search"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools[]=custom"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"client_metadata": {"x": "y"}}, "client_metadata"),
    (RESPONSES, {"input": SEARCHED}, "input[]=web_search_call"),
    (MESSAGES, {"context_management": {"edits": []}}, "context_management"),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    (MESSAGES, {"system": CACHED}, "system[].cache_control"),
    (MESSAGES, {"tools": [EAGER]}, "tools[].eager_input_streaming"),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[]=web_search_20250305",
    ),
]


@pytest.mark.parametrize(("path", "sent", "named"), TAKEN, ids=[named for _, _, named in TAKEN])
def test_a_field_that_changes_nothing_is_taken_and_named(live_server, until, path, sent, named):
    assert _ignored_fields(live_server.post(path, EVERY[path] | sent)) == named.split(", ")
    until(lambda: f'"ignored":"{named}"' in live_server.log.getvalue(), "the log to name it")


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (CHAT, {"metadata": None, "audio": None, "prediction": None, "functions": [], "stream": None}),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}, *HI], "n": None}),
        (CHAT, {"tools": [], "stream_options": {"include_usage": True}, "stop": None}),
        (CHAT, {"min_tokens": 0, "ebnf": "", "mood": None, "n_ctx": 0, "is": False}),
        ("/v1/completions", {"best_of": 1, "seed": None}),
        ("/completion", {"dynatemp_range": 0.0, "xtc_probability": 0}),
        (CHAT, {"tools": [{"function": {"name": "a"}}], "logprobs": False, "top_logprobs": 0}),
        (RESPONSES, {"max_tool_calls": None, "prompt": None, "background": False, "metadata": {}}),
        (RESPONSES, {"reasoning": {"summary": None}, "tools": [], "previous_response_id": None}),
        (MESSAGES, {"container": None, "mcp_servers": [], "stream": None, "context_management": None}),
    ],
)
def test_nulls_zeros_and_empty_values_are_nothing(live_server, path, sent):
    assert _ignored_fields(live_server.post(path, EVERY[path] | sent)) == [""]


def test_an_unknown_field_is_ignored_and_named(live_server):
    answer = live_server.chat(**{"mood": 0, "zesty\r\nx: y": 2})
    assert _ignored_fields(answer) == ["mood", "zesty??x:?y"]


def test_names_in_the_header_are_safe_and_few(live_server):
    for include in (["a\r\nb, ü"], ["x" * 1024] * 64):
        names = _ignored_fields(live_server.post(RESPONSES, EVERY[RESPONSES] | {"include": include}))
        assert names == ["include=a??b? ?"] or names == [f"include={'x' * 88}"] * 32


def test_a_large_body_is_read_alike(live_server, engine):
    turns = [{"role": "user", "content": "word " * 40_000, "name": "x"}]
    assert _ignored_fields(live_server.post(CHAT, {"messages": turns, "user": "u"})) == ["user"]
    assert len(engine.requests[-1].messages[0].content) == 200_000


def test_tools_of_a_namespace_come_back_under_it(serve):
    engine = FakeEngine([[ToolCallDelta(index=0, id="c", name="mcp.look", arguments="{}")]])
    live_server = serve(engine)
    tools = [{"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "look"}]}]
    item = {"type": "function_call", "call_id": "b", "namespace": "mcp", "name": "look"}
    item["arguments"] = "{}"
    sent = {"input": [*HI, item], "tools": tools, "tool_choice": {"type": "function", "name": "look"}}
    (call,) = live_server.post(RESPONSES, sent).json()["output"]
    assert (call["namespace"], call["name"]) == ("mcp", "look")
    (request,) = engine.requests
    assert [tool.name for tool in request.tools] == ["mcp.look"]
    assert request.tool_choice.name == request.messages[1].tool_calls[0].name == "mcp.look"


def test_stream_with_tools_begins_with_null_content(live_server):
    def begins(**sent):
        first = live_server.chat(stream=True, **sent).text.partition("data: ")[2].partition("\n")[0]
        return json.loads(first)["choices"][0]["delta"]["content"]

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert begins() == ""
    assert begins(tools=tools) is None
    assert begins(tools=tools, tool_choice="none") == ""


def test_vllms_name_of_the_repeat_penalty_is_honoured(live_server, engine):
    assert live_server.chat(repetition_penalty=1.3).status_code == 200
    assert engine.requests[-1].sampling.repeat_penalty == 1.3


def test_a_deferred_tool_is_offered_once_it_is_referred_to(live_server, engine):
    search, paint = ({"name": name, "input_schema": SCHEMA} for name in ("ToolSearch", "paint"))
    tools = [search, paint | {"defer_loading": True}]

    def offered_tools(messages):
        sent = {"messages": messages, "max_tokens": 8, "tools": tools}
        assert live_server.post(MESSAGES, sent).status_code == 200
        return [tool.name for tool in engine.requests[-1].tools]

    assert offered_tools(HI) == ["ToolSearch"]
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    references = [{"type": "tool_reference", "tool_name": "paint"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": references}
    turns = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert offered_tools(turns) == ["ToolSearch", "paint"]
    del tools[0]
    assert offered_tools(HI) == ["paint"], "nothing could find it"


def test_beta_header_is_taken_and_named(live_server):
    headers = {"anthropic-beta": "claude-code-20250219"}
    answer = live_server.post(f"{MESSAGES}?beta=true", EVERY[MESSAGES], headers=headers)
    assert _ignored_fields(answer) == ["anthropic-beta"]


def test_thread_request_is_refused_with_details_for_the_client(live_server):
    refused = live_server.post(MESSAGES, EVERY[MESSAGES] | {"thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.json()["error"]["details"] == details
