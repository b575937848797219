"""Unsupported fields are refused by name, in the API's own error format, before the engine is used."""

import json

import pytest
from least_requests import HI

from edgeinfer.errors import InvalidRequestError, QueueFullError


def _post(live_server, path, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return live_server.client.post(path, content=raw, headers={"content-type": "application/json"})


#: (additional fields, the first refused field, the error's code)
CHAT = [
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"messages": [*HI, {"role": "function", "name": "f"}]}, "messages[1].role", "unsupported_value"),
    ({"guided_json": {"a": 1}}, "guided_json", "unsupported_parameter"),
    ({"regex": "a+"}, "regex", "unsupported_parameter"),
    ({"ebnf": "root ::= x"}, "ebnf", "unsupported_parameter"),
    ({"n_ctx": 512}, "n_ctx", "unknown_parameter"),
    ({"gpu_layers": 0}, "gpu_layers", "unknown_parameter"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
    ({"temperature": 10.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 33}, "n", "integer_above_max_value"),
    ({"n": 10**30}, "n", "integer_above_max_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
    ({"max_tokens": -2}, "max_tokens", "integer_below_min_value"),
    ({"top_p": 1.01}, "top_p", "decimal_above_max_value"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]", "decimal_above_max_value"),
    ({"stop": [""]}, "stop[0]", "string_below_min_length"),
    ({"stop": ["a"] * 129}, "stop", "array_above_max_length"),
    ({"keep_alive": "soon"}, "keep_alive", "invalid_value"),
    ({"messages": []}, "messages", "array_below_min_length"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"function": {"name": "x"}}}, "tool_choice", "invalid_value"),
    (
        {"tools": [{"function": {"name": "a"}}, {"function": {"name": "a"}}]},
        "tools[1].name",
        "invalid_value",
    ),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"grammar": "x", "response_format": {"type": "json_object"}}, "grammar", "invalid_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"model": ""}, "model", "string_below_min_length"),
    (
        {
            "messages": [*HI, {"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
        "invalid_value",
    ),
    ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
]


@pytest.mark.parametrize(
    ("body", "param", "code"), CHAT, ids=[f"{param}-{code}" for _, param, code in CHAT]
)
def test_a_chat_field_is_refused_by_name(live_server, engine, body, param, code):
    before = len(engine.requests)
    answer = live_server.chat(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert len(engine.requests) == before


NO_REQUEST = {
    "empty": (b"", "not valid JSON"),
    "torn": (b"{", "not valid JSON"),
    "nothing": (b"{}", "Missing required parameter: 'messages'."),
    "null": (b"null", "object"),
    "array": (b"[]", "object"),
    "bad-utf8": (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', "UTF-8"),
    "surrogate": (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "not valid JSON"),
    "bad-utf8-behind-a-bad-field": (b'{"n":0,"messages":[{"role":"user","content":"\xff"}]}', "UTF-8"),
    "deep": (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    "deep-schema": (b'{"tools":[{"function":{"name":"a","parameters":' + b'{"a":' * 50_000, ""),
    "huge-float": (b'{"temperature":1e999}', "range"),
    "nan": (b'{"temperature":NaN}', "not valid JSON"),
    "huge-int": (b'{"n":' + b"9" * 5000 + b"}", ""),
}


@pytest.mark.parametrize(("raw", "said"), NO_REQUEST.values(), ids=NO_REQUEST)
def test_a_body_that_is_no_request_is_a_400(live_server, raw, said):
    answer = _post(live_server, "/v1/chat/completions", raw)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"user":"x","temperature":1e999}', "temperature"),
        (b'{"seed":' + b"9" * 5000 + b"}", "seed"),
        (b'{"logit_bias":{"1":1e999}}', "logit_bias[...]"),
    ],
    ids=["float", "integer", "inner"],
)
def test_number_out_of_range_names_its_field(live_server, raw, param):
    error = _post(live_server, "/v1/chat/completions", raw).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"].startswith(f"Invalid '{param}': ")
    assert error["message"].endswith("out of range.")


def test_every_field_that_is_wrong_is_named_at_once(live_server):
    messages = [{"role": "robot"}, {"role": "user", "content": [{"type": "input_audio"}]}]
    wrong = {"temperature": "hot", "n": 0, "audio": {"voice": "x"}}
    error = live_server.chat(messages=messages, **wrong).json()["error"]
    assert error["param"] == "messages[0].role"
    for said in ("'robot'", "audio input is not supported", "'temperature'", "'n'", "'audio'"):
        assert said in error["message"]


def test_routes_and_methods_that_do_not_exist_have_the_envelope(live_server):
    assert live_server.get("/v3/x").json()["error"]["code"] == "not_found"
    wrong = live_server.client.put("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_anthropic_errors_have_anthropics_envelope(live_server):
    answer = _post(live_server, "/v1/messages", {"max_tokens": 1, "messages": HI, "container": "x"})
    body = answer.json()
    assert (answer.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == answer.headers["request-id"]


def test_query_fields_are_refused_like_body_fields(live_server):
    assert live_server.get("/infer").json()["error"]["param"] == "prompt"
    assert live_server.get("/infer?prompt=a&prompt=b").json()["error"]["param"] == "prompt"
    assert live_server.get("/infer?prompt=a&max_tokens=x").json()["error"]["param"] == "max_tokens"
    assert live_server.get("/infer?prompt=a&max_tokens=1").json()["result"] == "Hello"


#: (route, body, the refused field)
OTHERS = [
    ("/v1/responses", {"input": [*HI, {"type": "image_generation_call"}]}, "input[1].type"),
    ("/v1/responses", {"input": [{"role": "user", "content": 1}]}, "input[0].content"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    *(("/v1/completions", {"prompt": p}, "prompt") for p in (["a", 1], [1, [2]], ["a", [1]], [])),
    ("/v1/completions", {"prompt": ["a"] * 64, "n": 2}, "n"),
    ("/v1/embeddings", {"input": "x", "dimensions": 9}, "dimensions"),
]


@pytest.mark.parametrize(("path", "body", "param"), OTHERS)
def test_a_field_of_another_route_is_refused_by_name(live_server, path, body, param):
    answer = _post(live_server, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("no", param="grammar"), 400, "invalid_value"),
        (QueueFullError("full"), 503, "queue_full"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_the_engine_has_a_status_even_when_streaming(
    live_server, engine, error, status, code, stream, monkeypatch
):
    def refuse(request):
        raise error

    monkeypatch.setattr(engine, "submit", refuse)
    answer = live_server.chat(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    if status == 503:
        assert int(answer.headers["retry-after"]) >= 1


def test_internal_error_is_a_500_without_details(live_server, engine, monkeypatch):
    def fail(request):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine, "submit", fail)
    answer = live_server.chat()
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
    assert "secret detail" in live_server.log.getvalue()


@pytest.mark.parametrize(("name", "flag"), [("n_ctx", "--ctx"), ("kv_type", "--kv-type")])
def test_an_option_of_load_time_is_refused_with_its_place(live_server, name, flag):
    error = _post(live_server, "/v1/chat/completions", {"messages": HI, name: 512}).json()["error"]
    assert error["message"].endswith(f"'{name}'; it is a load option: start the endpoint with {flag}.")
