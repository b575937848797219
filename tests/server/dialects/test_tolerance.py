"""Spellings of other servers and clients with the same meaning are accepted."""

import base64
import json

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace

from edgeinfer.errors import InvalidRequestError, ModelLoadError
from edgeinfer.media.pictures import decode_file
from edgeinfer.server.problems import from_error
from edgeinfer.server.request_fields import seed_of

CALL = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}


def test_arguments_of_a_call_may_be_an_object(live_server, engine):
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_a", "content": None},
    ]
    assert live_server.chat(messages=turns).status_code == 200
    _, assistant, result = engine.requests[-1].messages
    assert json.loads(assistant.tool_calls[0].arguments) == {"x": [1, "é"]}
    assert result.content == ""


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_text_has_either_name_in_either_api(live_server, engine, kind):
    content = [{"type": kind, "text": "hello"}]
    turns = [{"role": "user", "content": content}]
    assert live_server.chat(messages=turns).status_code == 200
    assert engine.requests[-1].messages[0].content == "hello"
    assert live_server.post("/v1/responses", {"input": turns}).status_code == 200
    assert engine.requests[-1].messages[0].content == "hello"


def test_output_of_a_function_may_be_an_object(live_server, engine):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": {"ok": True}},
    ]
    assert live_server.post("/v1/responses", {"input": items}).status_code == 200
    assert json.loads(engine.requests[-1].messages[-1].content) == {"ok": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"model": "fake", "max_tokens": 5}),
        ("/completion", {"prompt": "a", "messages": None}),
    ],
)
def test_top_k_of_minus_one_is_off(live_server, engine, path, body):
    body = {"messages": [{"role": "user", "content": "a"}], "top_k": -1} | body
    body = {name: value for name, value in body.items() if value is not None}
    assert live_server.post(path, body).status_code == 200
    assert engine.requests[-1].sampling.top_k == 0
    assert live_server.post(path, body | {"top_k": -2}).status_code == 400


def test_base64_is_read_as_clients_spell_it():
    data = bytes(range(256)) + b"\xfb\xff\xfe?"
    text = base64.b64encode(data).decode()
    url = base64.urlsafe_b64encode(data).decode()
    broken = "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for spelled in (text, text.rstrip("="), url, url.rstrip("="), broken, f"data:;base64,{broken}"):
        assert decode_file(spelled, InvalidRequestError) == data
    for wrong in ("a", "****", "ab*d", "\u00e9\u00e9\u00e9\u00e9"):
        with pytest.raises(InvalidRequestError):
            decode_file(wrong, InvalidRequestError)


def test_64_bit_seeds_map_to_different_32_bit_seeds():
    assert [seed_of(seed) for seed in (0, 5, 4_294_967_294)] == [0, 5, 4_294_967_294]
    assert seed_of(-1) is None
    seeds = [5, 5 + (1 << 32), 5 + (1 << 33), -5, (1 << 32) - 1, (1 << 33) - 1, (1 << 63) - 1]
    seeds_used = [seed_of(seed) for seed in seeds]
    assert len(set(seeds_used)) == len(seeds)
    assert all(0 <= seed < 0xFFFF_FFFF for seed in seeds_used)


def test_seeds_of_several_answers_stay_in_range(live_server, engine):
    live_server.chat(seed=0xFFFF_FFFE, n=3, temperature=1)
    seeds = [request.sampling.seed for request in engine.requests[-3:]]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 0xFFFF_FFFF for seed in seeds)


@pytest.mark.parametrize(("eos", "n_special"), [("[SEP]", 3), ("</s>", 4)])
def test_usage_of_a_reranking_counts_special_tokens(serve, eos, n_special):
    class Counting(FakeEngine):
        def tokenize(self, text, *, add_special=False, parse_special=False):
            return [1] * (len(text.split()) + 2 * add_special)

    live_server = serve(Counting(info=replace(DEFAULT_INFO, eos_token=eos)))
    body = {"query": "two words", "documents": ["a", "b c d"]}
    usage = live_server.post("/v1/rerank", body).json()["usage"]
    assert usage["prompt_tokens"] == 2 * 2 + 1 + 3 + 2 * n_special


def test_ollama_version_is_accepted_by_codex(live_server):
    version = live_server.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


@pytest.mark.parametrize("path", ["/home/someone/models/a.gguf", "~/models/a.gguf", "/a.gguf"])
def test_errors_do_not_contain_folders_of_the_server(path):
    error = ModelLoadError(f"{path}: not a model, see https://a.example/b/c", hint=f"pull {path}")
    assert from_error(error).message.removeprefix("/") in (
        "a.gguf: not a model, see https://a.example/b/c (pull a.gguf)",
        "a.gguf: not a model, see https://a.example/b/c (pull /a.gguf)",
    )
