"""Ollama's API on a scripted engine: the responses that its clients expect."""

import json

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from least_requests import HI
from msgspec.structs import replace

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta, Timings, ToolCallDelta, Usage
from edgeinfer.runtime.requests import Infill, JsonSchema
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.request_fields import keep_alive_s

CAN = dict.fromkeys(("can_think", "can_infill", "can_shift"), True)
INFO = replace(DEFAULT_INFO, **CAN, architecture="llama", n_params=134_500_000)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(info=INFO)


def _lines(answer) -> list[dict]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def _chat(live_server, **body):
    return live_server.post("/api/chat", {"model": "fake", "messages": HI} | body)


def _generate(live_server, **body):
    return live_server.post("/api/generate", {"model": "fake", "prompt": "hi"} | body)


def test_chat_streams_lines_by_default(live_server):
    *pieces, last = _lines(_chat(live_server))
    assert [piece["message"]["content"] for piece in pieces] == ["Hello", " world"]
    assert all(piece["message"]["role"] == "assistant" and not piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == 2
    assert last["prompt_eval_count"] > 0
    assert last["total_duration"] > last["load_duration"] > 0
    assert last["model"] == "fake"


def test_statistics_are_nanoseconds(serve):
    usage = Usage(prompt_tokens=7, completion_tokens=3)
    finished = Finished(reason="length", usage=usage, timings=Timings(prefill_ms=1.5, decode_ms=2.0))
    said = _chat(serve(FakeEngine([["a", finished]])), stream=False).json()
    assert (said["prompt_eval_count"], said["eval_count"]) == (7, 3)
    assert (said["prompt_eval_duration"], said["eval_duration"]) == (1_500_000, 2_000_000)
    assert said["done_reason"] == "length"


def test_thinking_and_whole_tool_calls_have_their_own_fields(serve):
    call = [
        ToolCallDelta(0, id="call_1", name="light", arguments='{"on":'),
        ToolCallDelta(0, arguments="true}"),
        ToolCallDelta(1, id="call_2", name="noise", arguments="{}"),
    ]
    script = [ReasoningDelta("hm"), TextDelta("so"), *call]
    live_server = serve(FakeEngine([script], info=INFO))
    first = {"id": "call_1", "function": {"index": 0, "name": "light", "arguments": {"on": True}}}
    second = {"id": "call_2", "function": {"index": 1, "name": "noise", "arguments": {}}}
    messages = [line["message"] for line in _lines(_chat(live_server))]
    assert messages[0] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert messages[1] == {"role": "assistant", "content": "so"}
    assert [m["tool_calls"] for m in messages if "tool_calls" in m] == [[first], [second]]
    whole = _chat(live_server, stream=False).json()["message"]
    assert (whole["thinking"], whole["tool_calls"]) == ("hm", [first, second])


def test_a_call_that_was_cut_short_is_no_call(serve):
    live_server = serve(FakeEngine([[ToolCallDelta(0, id="call_1", name="light", arguments='{"on":')]]))
    assert "tool_calls" not in _chat(live_server, stream=False).json()["message"]
    assert all("tool_calls" not in line["message"] for line in _lines(_chat(live_server)))


def test_a_tools_answer_without_an_id_belongs_to_the_call_it_names(live_server, engine):
    function = {"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}
    calls = {"light": {"on": True}, "noise": '{"loud": 1}'}
    called = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls.items()]
    turns = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "tool_name": "noise", "content": "loud"},
        {"role": "tool", "content": "on"},
    ]
    assert _chat(live_server, messages=turns, tools=[function]).status_code == 200
    asked = engine.requests[-1]
    first, second = asked.messages[1].tool_calls
    assert (first.arguments, second.arguments) == ('{"on":true}', '{"loud": 1}')
    assert (asked.messages[2].tool_call_id, asked.messages[3].tool_call_id) == (second.id, first.id)
    assert asked.messages[3].name == "light"
    assert asked.tools[0].name == "light"


def test_options_reach_the_sampler_and_floats_are_whole_numbers_too(live_server, engine):
    options = {"num_predict": 5, "stop": ["x"], "num_ctx": 2048.0}
    options |= {"temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "seed": 7}
    options |= {"repeat_penalty": 1.2, "repeat_last_n": 33.0}
    assert "x-edgeinfer-ignored" not in _chat(live_server, options=options).headers
    asked = engine.requests[-1]
    s = asked.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (0, 0, 0.5, 0.1, 7)
    assert (s.repeat_penalty, s.repeat_last_n) == (1.2, 33)
    assert (asked.max_tokens, asked.stop, asked.overflow) == (5, ("x",), "shift")


def test_load_options_and_unsupported_samplers_are_ignored_and_named(live_server):
    answer = _chat(live_server, options={"num_ctx": 100_000, "num_gpu": 1, "mirostat": 2})
    assert answer.status_code == 200
    for ignored in ("options.num_gpu", "options.mirostat", "options.num_ctx (4096 here"):
        assert ignored in answer.headers["x-edgeinfer-ignored"]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        *(({"options": {"num_predict": n}}, {"max_tokens": None}) for n in (-1, -2, 0, None)),
        ({"format": "json"}, {"constraint": JsonSchema({"type": "object"})}),
        ({"format": {"type": "array"}}, {"constraint": JsonSchema({"type": "array"})}),
        ({"format": ""}, {"constraint": None}),
        ({"format": None}, {"constraint": None}),
        ({"think": None}, {"template_options": {}, "reasoning_budget": None}),
        ({"think": True}, {"template_options": {"enable_thinking": True}, "reasoning_budget": None}),
        ({"think": False}, {"template_options": {"enable_thinking": False}, "reasoning_budget": 0}),
        (
            {"think": "high"},
            {"template_options": {"enable_thinking": True, "reasoning_effort": "high"}},
        ),
    ],
)
def test_field_reaches_the_engine(live_server, engine, body, fields):
    _chat(live_server, **body)
    assert {name: getattr(engine.requests[-1], name) for name in fields} == fields
    assert _generate(live_server, raw=True, **body).status_code == 200


@pytest.mark.parametrize(
    ("asked", "field", "lacks"),
    [({"think": True}, "think", "thinking"), ({"suffix": "x"}, "suffix", "insert")],
)
def test_unsupported_capability_is_refused(serve, asked, field, lacks):
    live_server = serve(FakeEngine())
    assert _generate(live_server, think=False).status_code == 200
    refused = _generate(live_server, **asked, stream=False)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"fake does not support {lacks} (leave {field} out")


def test_generate_makes_a_conversation_of_its_prompt(live_server, engine):
    *pieces, last = _lines(_generate(live_server, system="be brief"))
    assert "".join(piece["response"] for piece in pieces) == "Hello world"
    assert (last["done_reason"], last["response"]) == ("stop", "")
    assert [turn.content for turn in engine.requests[-1].messages] == ["be brief", "hi"]


@pytest.mark.parametrize("body", [{"raw": True}, {"template": "{{ .Prompt }}"}])
def test_a_raw_prompt_is_taken_as_it_is(live_server, engine, body):
    assert _generate(live_server, **body).status_code == 200
    assert engine.requests[-1].prompt == "hi"


def test_suffix_makes_an_infill_request(live_server, engine):
    assert _generate(live_server, prompt="a = ", suffix="\nb = 2").status_code == 200
    assert engine.requests[-1].infill == Infill(prefix="a = ", suffix="\nb = 2")


def test_logprobs_come_with_their_tokens(real):
    body = {"model": "smollm2", "prompt": "hi", "logprobs": True, "top_logprobs": 2, "stream": False}
    body["options"] = {"num_predict": 2, "temperature": 0}
    said = real.post("/api/generate", body).json()
    assert len(said["logprobs"]) == said["eval_count"] == 2
    assert len(said["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/generate", {"images": ["aGk="]}, "the file is not a JPEG, PNG, WebP or GIF file"),
        ("/api/generate", {"context": [1, 2]}, "send the conversation to /api/chat"),
        ("/api/generate", {"template": "{{ .System }} {{ .Prompt }}"}, "template: "),
        ("/api/generate", {"raw": True, "system": "x"}, "system cannot be combined with raw"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "images": ["aGk="]}]},
            "the file is not a JPEG, PNG, WebP or GIF file",
        ),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive: 'soon' is not a duration"),
        ("/api/chat", {"options": {"top_p": 2}}, "options.top_p"),
        ("/api/chat", {"think": "very"}, "think"),
    ],
)
def test_unsupported_field_is_refused_by_name(live_server, path, body, said):
    answer = (_chat if path == "/api/chat" else _generate)(live_server, **body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]


@pytest.mark.parametrize("body", [{"images": []}, {"context": []}, {"template": ""}, {"suffix": ""}])
def test_an_empty_list_or_text_asks_for_nothing(live_server, body):
    assert _generate(live_server, **body).status_code == 200


def test_showing_an_unknown_model_is_a_404_that_says_not_found(live_server):
    assert "not found" in live_server.post("/api/show", {"model": "nobody"}, status=404).json()["error"]


def test_curl_without_a_header_is_understood(live_server):
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"model": "fake", "prompt": "hi", "stream": false}'
    answer = live_server.client.post("/api/generate", content=body, headers=form)
    assert answer.json()["response"] == "Hello world"
    evil = form | {"origin": "https://evil.example"}
    assert live_server.client.post("/api/generate", content=body, headers=evil).status_code == 403


def test_paths_that_do_not_exist_are_refused_as_ollama_does(live_server):
    error = "There is no such route; GET /openapi.json lists all routes."
    assert live_server.get("/api/nothing").json() == {"error": error}
    assert live_server.get("/api/chat").status_code == 405


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
def test_a_name_may_have_its_tag(live_server, name):
    assert _chat(live_server, model=name, stream=False).json()["model"] == name
    assert live_server.post("/api/show", {"name": name}).status_code == 200


@pytest.mark.parametrize(
    ("seconds", "forms"),
    [
        (0, [0, "0", "0s"]),
        (90, [90]),
        (0.25, ["250ms"]),
        (300, ["5m", "300"]),
        (5400, ["1h30m"]),
        (-1, [-1, -0.5, "-1", "-1.0s", "-1m", "999999h"]),
    ],
)
def test_keep_alive_has_many_forms(seconds, forms):
    assert [keep_alive_s(keep_alive) for keep_alive in forms] == [seconds] * len(forms)


@pytest.mark.parametrize("keep_alive", ["", "soon", "5 m", "5x", "m", "1h5", "--1s", "1e9s", "NaN"])
def test_keep_alive_refuses_other_words(keep_alive):
    with pytest.raises(InvalidRequestError):
        keep_alive_s(keep_alive)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_request_without_prompt_loads_and_unloads(serve, path):
    live_server = serve(load=lambda *_: LoadedEngine(engine=FakeEngine()), names=("fake", "other"))
    for keep_alive, reason in (("10m", "load"), (0, "unload")):
        said = live_server.post(path, {"model": "other:latest", "keep_alive": keep_alive}).json()
        assert (said["done"], said["done_reason"]) == (True, reason)
        running = [model["name"] for model in live_server.get("/api/ps").json()["models"]]
        assert ("other:latest" in running) is (reason == "load")


def test_only_a_models_own_name_unloads_it(serve):
    live_server = serve(FakeEngine())
    assert live_server.post("/api/generate", {"model": "typo", "keep_alive": "10m"}).status_code == 200
    assert live_server.post("/api/generate", {"model": "typo", "keep_alive": 0}).status_code == 404


def test_show_lists_capabilities_of_a_loaded_model(live_server):
    shown = live_server.post("/api/show", {"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["details"]["parameter_size"] == "134.5M"
    assert live_server.post("/api/show", {}).status_code == 400


def test_embeddings_have_two_routes(live_server):
    single = live_server.post("/api/embed", {"model": "fake", "input": "river"}).json()
    many = live_server.post("/api/embed", {"model": "fake", "input": ["river", "sea"]}).json()
    old = live_server.post("/api/embeddings", {"model": "fake", "prompt": "river"}).json()
    assert single["embeddings"][0] == many["embeddings"][0] == old["embedding"]
    assert (single["prompt_eval_count"], len(many["embeddings"])) == (5, 2)
    short = live_server.post("/api/embed", {"model": "fake", "input": "river", "dimensions": 2})
    (vector,) = short.json()["embeddings"]
    assert len(vector) == 2
    assert abs(sum(x * x for x in vector) - 1) < 1e-6
    nothing = live_server.post("/api/embed", {"model": "fake", "input": []}).json()
    assert nothing["embeddings"] == []


def test_a_long_text_loses_its_beginning_unless_that_is_forbidden(serve, chatterer):
    live_server = serve(chatterer())
    ask = {"model": "chatterer", "messages": [{"role": "user", "content": "x" * 400}], "stream": False}
    ask |= {"options": {"num_predict": 2}}
    assert live_server.post("/api/chat", ask).json()["prompt_eval_count"] < 256
    for never in ("truncate", "shift"):
        refused = live_server.post("/api/chat", ask | {never: False}, status=400)
        assert refused.json()["error"].startswith("the input length exceeds the context length")
    embed = {"model": "chatterer", "input": "x" * 400}
    assert live_server.post("/api/embed", embed).json()["prompt_eval_count"] == 256
    refused = live_server.post("/api/embed", embed | {"truncate": False})
    assert refused.json()["error"].startswith("the input length exceeds the context length")
