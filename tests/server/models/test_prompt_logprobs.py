"""Log-probabilities of a prompt's tokens: OpenAI's `echo` with `logprobs`."""

import numpy as np
import pytest
from made_models import make_llama
from raw_logits import read

from edgeinfer.runtime.requests import GenerateRequest

CONTEXT = [ord(letter) for letter in "Which of these animals says meow, the cat or the dog? It is"]
#: Maximum error of a log probability: the engine's KV cache is f16, that of the raw logits f32. Wrong
#: tokens differ by 0.5 or more.
ROUNDED = 0.03
OPTIONS = [[*CONTEXT, *b" the cat"], [*CONTEXT, *b" the dog"], [*CONTEXT, *b" a horse"]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("scored") / "scored.gguf")


@pytest.fixture(scope="module")
def engine(load_model, path):
    return load_model(path, "scored", n_ctx=256, n_parallel=4, kv_type="f16")


def _complete(live_server, **body):
    return live_server.post("/v1/completions", body, status=200).json()


def _raw_logprobs(path, tokens):
    """Return llama.cpp's log probability of each token after the first, and the highest ones."""
    rows = read(path, tokens).astype(np.float64)[:-1]
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows[np.arange(len(rows)), tokens[1:]], rows.max(axis=1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_of_a_list_are_those_of_raw_logits(live_server, path, max_tokens):
    asked = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
    reply = _complete(live_server, prompt=OPTIONS, **asked)
    for option, choice in zip(OPTIONS, reply["choices"], strict=True):
        logprobs = choice["logprobs"]
        raw, best = _raw_logprobs(path, option)
        assert len(logprobs["token_logprobs"]) == len(option) + max_tokens
        assert logprobs["token_logprobs"][0] is None
        np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(option)], raw, atol=ROUNDED)
        tops = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(option)]]
        np.testing.assert_allclose(tops, best, atol=ROUNDED)
        assert choice["text"].startswith(bytes(option).decode())
        sums = sum(logprobs["token_logprobs"][len(CONTEXT) : len(option)])
        assert sums == pytest.approx(raw[len(CONTEXT) - 1 :].sum(), abs=4 * ROUNDED)


def test_shared_prefix_is_computed_once_in_a_list_and_across_requests(live_server):
    prompts = [[*b"<list>", *option] for option in OPTIONS]
    details = _complete(live_server, prompt=prompts, echo=True, logprobs=0, max_tokens=0)["usage"]
    cached = details["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 2 * len(CONTEXT)
    again = _complete(live_server, prompt=prompts[0], echo=True, logprobs=0, max_tokens=1)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= len(prompts[0]) - 2


def test_prefix_cached_without_logprobs_is_computed_again(live_server, path):
    prompt = [*b"plain first: ", *OPTIONS[0]]
    _complete(live_server, prompt=prompt, max_tokens=1)
    scored = _complete(live_server, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    raw, _ = _raw_logprobs(path, prompt)
    logprobs = scored["choices"][0]["logprobs"]["token_logprobs"][1:]
    np.testing.assert_allclose(logprobs, raw, atol=ROUNDED)
    plain = _complete(live_server, prompt=[*prompt, 65], max_tokens=1)["usage"]
    assert plain["prompt_tokens_details"]["cached_tokens"] == len(prompt)


def test_cached_logprobs_end_where_the_text_differs(engine, path):
    """Request the logprobs of a prompt, continue it, and then request those of other endings."""

    def score(text):
        request = GenerateRequest(prompt=tuple(text), max_tokens=0, prompt_logprobs=1)
        (scored,) = [e for e in engine.submit(request) if type(e).__name__ == "PromptLogprobs"]
        return [token.chosen.logprob for token in scored.tokens]

    begin = [*b"A scored beginning that is long enough"]
    score(begin)
    for _ in engine.submit(GenerateRequest(prompt=(*begin, *b" goes on"), max_tokens=4)):
        pass
    for ending in (b" goes on", b" ends otherwise", b""):
        raw, _ = _raw_logprobs(path, [*begin, *ending])
        np.testing.assert_allclose(score([*begin, *ending]), raw, atol=ROUNDED)


def test_generated_end_counts_as_a_token(live_server, engine):
    """Evaluation harnesses drop the last logprob, because it belongs to the generated token."""
    (end_token,) = engine.tokenize("<|end|>", parse_special=True)
    prompt = OPTIONS[0]
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    reply = _complete(live_server, **asked, logit_bias={str(end_token): 100})
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


def test_streamed_echo_joins_to_the_whole_one(live_server):
    body = {"prompt": OPTIONS[1], "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    (whole,) = _complete(live_server, **body)["choices"]
    events = live_server.events("/v1/completions", body)
    choices = [choice for _, chunk in events for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]

    def join(field):
        return [entry for choice in choices for entry in (choice["logprobs"] or {}).get(field, [])]

    for field in ("tokens", "text_offset"):
        assert join(field) == whole["logprobs"][field]
    logprobs = whole["logprobs"]["token_logprobs"]
    assert join("token_logprobs")[1:] == pytest.approx(logprobs[1:], abs=1e-3)
    assert [sorted(top or {}) for top in join("top_logprobs")] == [
        sorted(top or {}) for top in whole["logprobs"]["top_logprobs"]
    ]


def test_text_prompt_is_echoed_as_it_was_sent(live_server):
    reply = _complete(live_server, prompt="Text, once.", echo=True, logprobs=0, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["text"] == "Text, once."
    assert "".join(choice["logprobs"]["tokens"]).endswith("Text, once.")
