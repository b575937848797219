"""Habits of scripts and clients: spellings of paths, llama.cpp's routes, model cards."""

import math

import pytest
from fake_engine import FakeEngine
from least_requests import HI

from edgeinfer.runtime.events import Logprob, TextDelta, TokenLogprobs
from edgeinfer.server.app import match_route
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.model_pool import AvailableModel


@pytest.mark.parametrize(
    ("path", "operation_path"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models/a", "/v1/models/{id}"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models", "/v1/models"),
        ("/models/fake/", "/v1/models/{id}"),
        ("/rerank", "/v1/rerank"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_path_is_found_however_its_base_url_was_written(path, operation_path):
    (operation, *_) = match_route(path).methods.values()
    assert operation.path == operation_path


def test_similar_paths_do_not_match(live_server):
    for path in ("/v1", "/v1/v1/v1/models", "/v2/models", "/v1chat/completions"):
        assert not match_route(path).methods, path
    assert live_server.post("/chat/completions/", {"messages": HI}).status_code == 200


def test_a_spelling_opens_no_route_that_wants_a_key(serve):
    live_server = serve(FakeEngine(), keys=["k" * 20])
    assert live_server.get("/v1/health").status_code == 200
    for path in ("//v1/models", "/models/", "/v1/metrics", "/health/../metrics"):
        assert live_server.get(path).status_code in (401, 404), path
    assert live_server.post("/completions/", {"prompt": "x"}).status_code == 401


def test_as_many_texts_are_embedded_as_openai_takes(live_server):
    texts = [f"text {i}" for i in range(2048)]
    answer = live_server.post("/v1/embeddings", {"input": texts})
    assert len(answer.json()["data"]) == 2048
    answer = live_server.post("/v1/embeddings", {"input": [*texts, "one more"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_a_card_tells_the_context_in_every_name(live_server):
    listed = live_server.get("/v1/models").json()
    (card,) = listed["data"]
    assert (listed["has_more"], listed["first_id"]) == (False, "fake")
    names = ("n_ctx", "max_model_len", "context_length", "max_input_tokens")
    assert [card[name] for name in names] == [4096] * 4
    assert (card["type"], card["display_name"], card["meta"]["n_ctx_train"]) == ("model", "fake", 4096)
    assert card["created_at"] == "1970-01-01T00:00:00Z"


def test_completion_in_llama_cpps_shape(serve):
    engine = FakeEngine([["Hel", "lo"]])
    live_server = serve(engine)
    ask = {"prompt": "p", "n_predict": 7, "stop": ["x"], "top_k": 7, "id_slot": 0, "n_probs": 0}
    whole = live_server.post("/completion", ask).json()
    settings = whole["generation_settings"]
    assert (settings["top_k"], settings["n_predict"], settings["stop"]) == (7, 7, ["x"])
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("Hello", True, "eos")
    assert (whole["prompt"], whole["tokens_predicted"]) == ("p", 2)
    assert (engine.requests[0].max_tokens, engine.requests[0].prompt) == (7, "p")
    events = [data for _, data in live_server.events("/completion", ask | {"n_predict": -1})]
    assert [e["content"] for e in events] == ["Hel", "lo", ""]
    assert [e["stop"] for e in events] == [False, False, True]
    assert events[-1]["timings"]["predicted_n"] == 2
    assert engine.requests[1].max_tokens is None


LIKELY = TokenLogprobs(Logprob(72, b"H", -0.5), (Logprob(72, b"H", -0.5), Logprob(74, b"J", -1.0)))


def test_completion_tells_tokens_and_probabilities_if_asked_for(serve):
    engine = FakeEngine([[TextDelta("H", (LIKELY,))]] * 3)
    live_server = serve(engine)
    ask = {"prompt": [1, 2], "return_tokens": True, "n_probs": 2}
    whole = live_server.post("/completion", ask).json()
    assert whole["tokens"] == [72]
    (token,) = whole["completion_probabilities"]
    assert (token["id"], token["bytes"], token["logprob"]) == (72, [72], -0.5)
    assert [other["token"] for other in token["top_logprobs"]] == ["H", "J"]
    assert engine.requests[0].logprobs == 2
    assert "prompt" not in whole
    (_, first), (_, last) = live_server.events("/completion", ask)
    assert (first["tokens"], last["tokens_predicted"]) == ([72], 1)
    assert "tokens_predicted" not in first
    plain = live_server.post("/completion", {"prompt": "p"}).json()
    assert not {"tokens", "completion_probabilities"} & set(plain)
    refused = live_server.post("/completion", ask | {"post_sampling_probs": True}).json()
    assert refused["error"]["param"] == "post_sampling_probs"


def test_completion_takes_prompt_lists_objects_and_bias_pairs(serve):
    engine = FakeEngine(lambda request: [f"<{request.prompt}>"])
    live_server = serve(engine)
    several = live_server.post("/completion", {"prompt": ["a", "b"]}).json()
    assert [
        (completion["index"], completion["prompt"], completion["content"]) for completion in several
    ] == [(0, "a", "<a>"), (1, "b", "<b>")]
    events = live_server.events("/completion", {"prompt": ["a", "b"]})
    assert sorted(event["index"] for _, event in events if event["stop"]) == [0, 1]
    biased = {"prompt": {"prompt_string": "p"}, "logit_bias": [[15, False], [16, -0.5], [17, 2]]}
    assert live_server.post("/completion", biased).json()["content"] == "<p>"
    assert engine.requests[-1].sampling.logit_bias == {15: -math.inf, 16: -0.5, 17: 2.0}
    for wrong, param in (
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"prompt_string": "p", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"prompt": "p", "logit_bias": [[15, True]]}, "logit_bias"),
        ({"prompt": "p", "logit_bias": [["word", 1]]}, "logit_bias"),
    ):
        answer = live_server.post("/completion", wrong)
        assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, param)


def test_props_has_llama_cpps_fields(live_server):
    props = live_server.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 4096)
    assert props["default_generation_settings"]["params"]["top_k"] == 40


def test_card_of_a_cold_model_has_the_trained_context_in_every_name(serve):
    pulled = [AvailableModel(name="a"), AvailableModel(name="b", n_ctx_train=8192)]
    live_server = serve(
        load=lambda name, progress: LoadedEngine(engine=FakeEngine()),
        names=("a", "b"),
        pulled=lambda: pulled,
    )
    cold = live_server.get("/v1/models/b").json()
    names = ("n_ctx", "max_model_len", "context_length", "max_input_tokens")
    assert (cold["state"], *(cold[name] for name in names)) == ("cold", *[8192] * 4)


def test_error_for_a_body_that_is_not_json_says_what_to_send(live_server):
    form = {"content-type": "text/plain"}
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    for headers, reason in ((form, "content-type: application/json"), (packed, "compressed")):
        refused = live_server.client.post("/v1/completions", content=b"{}", headers=headers)
        assert (refused.status_code, reason in refused.text) == (415, True)
