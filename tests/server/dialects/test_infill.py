"""/infill and `suffix`, with a tiny model that has fill-in-the-middle tokens."""

import pytest
from fake_engine import FakeEngine
from made_models import FIM, make_llama

#: What llama.vscode 0.0.3x sends, field by field, from its source.
VSCODE = {
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\nprint(add(1, 2))\n",
    "input_extra": [{"text": "def sub(a, b): ...", "filename": "other.py", "time": 1730000000000}],
    "prompt": "    return ",
    "n_predict": 8,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}


@pytest.fixture(scope="module")
def live_server(serve_module, load_model, tmp_path_factory):
    path = make_llama(tmp_path_factory.mktemp("fim") / "made.gguf", 512, fim=tuple(FIM))
    return serve_module(load_model(path, "made", n_ctx=512))


def test_an_editors_request_is_answered_in_llama_cpps_shape(live_server):
    # `ignore_eos`, because random sampling could end the answer early
    answer = live_server.post("/infill", VSCODE | {"ignore_eos": True})
    said = answer.json()
    assert answer.status_code == 200, said
    assert (said["stop"], said["stop_type"], said["tokens_predicted"]) == (True, "limit", 8)
    assert said["timings"]["predicted_n"] == 8
    assert "t_max_predict_ms" in answer.headers["x-edgeinfer-ignored"]


def test_extra_context_is_read_ahead_without_an_answer(live_server):
    nothing = {"input_prefix": "", "input_suffix": "", "prompt": "", "samplers": [], "n_predict": 0}
    said = live_server.post("/infill", VSCODE | nothing).json()
    assert (said["content"], said["tokens_predicted"]) == ("", 0)
    assert said["tokens_evaluated"] > 0


def test_a_stream_ends_with_its_statistics(live_server):
    ask = VSCODE | {"seed": 3, "temperature": 0}
    events = [data for _, data in live_server.events("/infill", ask)]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    whole = live_server.post("/infill", ask).json()
    assert "".join(event["content"] for event in events) == whole["content"]


def test_suffix_in_completions_and_in_ollamas_generate_is_the_same(live_server):
    gap = {"model": "made", "prompt": "a = ", "suffix": "\nb", "stream": False}
    openai = live_server.post("/v1/completions", gap | {"max_tokens": 6, "temperature": 0}).json()
    options = {"num_predict": 6, "temperature": 0}
    ollama = live_server.post("/api/generate", gap | {"options": options}).json()
    assert openai["usage"]["prompt_tokens"] == ollama["prompt_eval_count"] == len("a = \nb") + 3
    assert openai["choices"][0]["text"] == ollama["response"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "x"}, "input_suffix"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
def test_model_without_infill_tokens_refuses_infill(serve, path, body, param):
    answer = serve(FakeEngine()).client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "does not support fill-in-the-middle" in error["message"]


def test_suffix_needs_text_and_adapter_ids_must_exist(live_server):
    answer = live_server.post("/v1/completions", {"prompt": [1, 2], "suffix": "y"})
    assert answer.json()["error"]["param"] == "suffix"
    answer = live_server.post("/infill", VSCODE | {"lora": [{"id": 0, "scale": 0.5}]})
    assert answer.json()["error"]["param"] == "lora[0].id"
