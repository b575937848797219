"""Adapters, speculation, embeddings and reranking over HTTP, on the real engine."""

from __future__ import annotations

import base64
import json
import re
import struct

import pytest
from made_models import MEAN, N_EMBD, RANK, make_adapter, make_bert

ASK = {"prompt": "A short note about rivers:", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def smol(serve_module, load_model, smollm2, tmp_path_factory):
    """The real small model with two adapters."""
    folder = tmp_path_factory.mktemp("lora")
    adapters = [
        make_adapter(folder / f"{name}.gguf", seed) for seed, name in enumerate(("red", "blue"))
    ]
    return serve_module(load_model(smollm2, "smol", n_ctx=1024, lora=",".join(adapters)))


def _completed(here, **fields) -> dict:
    answer = here.client.post("/v1/completions", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


SAY = "A short note about rivers:"
#: Path → what asks for one and the same in that dialect.
DIALECTS = {
    "/v1/messages": {
        "messages": [{"role": "user", "content": SAY}],
        "max_tokens": 16,
        "temperature": 0,
    },
    "/v1/responses": {"input": SAY, "max_output_tokens": 16, "temperature": 0},
    "/api/generate": {
        "prompt": SAY,
        "raw": True,
        "stream": False,
        "options": {"num_predict": 16, "temperature": 0},
    },
    "/infer": {"prompt": SAY, "max_tokens": 16, "temperature": 0},
    "/completion": {"prompt": SAY, "n_predict": 16, "temperature": 0},
}


@pytest.mark.model
@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_chooses_adapters(smol, path):
    red = [{"id": 0}] if path == "/completion" else [{"name": "red"}]

    def said(lora: list) -> str:
        body = DIALECTS[path] | {"model": "smol", "lora": lora}
        reply = smol.client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return json.dumps([found.get(key) for key in ("content", "output", "response", "result")])

    without_ids = re.compile(r'"id": "[^"]*"')
    assert without_ids.sub("", said([])) == without_ids.sub("", said([]))
    assert without_ids.sub("", said(red)) != without_ids.sub("", said([]))


@pytest.mark.model
def test_speculation_changes_nothing_but_the_counts(smol):
    asked = {"prompt": "one two three " * 8, "lora": []}
    off = _completed(smol, speculative="off", **asked)
    ngram = _completed(smol, speculative="ngram", **asked)
    texts = {answer["choices"][0]["text"] for answer in (off, ngram)}
    assert len(texts) == 1
    assert off["timings"]["draft_n"] == 0
    assert ngram["timings"]["draft_n"] >= ngram["timings"]["draft_n_accepted"] > 0
    scrape = smol.client.get("/metrics").text
    assert 'edgeinfer_spec_decode_num_accepted_tokens_total{model_name="smol"' in scrape


@pytest.fixture
def bert(serve, load_model, tmp_path):
    """`bert(pooling)`: the endpoint of a small encoder, or of a small reranker, and its engine."""

    def start(pooling: int):
        path = make_bert(tmp_path / "bert.gguf", pooling, head=pooling == RANK)
        engine = load_model(path, "bert", n_ctx=128)
        return serve(engine), engine

    return start


def test_an_encoder_embeds_as_numbers_and_as_base64(bert):
    here, engine = bert(MEAN)
    texts = ["red cat", "the dog sleeps on a mat"]
    plain = here.client.post("/v1/embeddings", json={"input": texts}).json()
    packed = here.client.post(
        "/v1/embeddings", json={"input": texts, "encoding_format": "base64"}
    ).json()
    wanted = engine.embed(texts)
    assert plain["usage"]["prompt_tokens"] == sum(
        len(engine.tokenize(text, add_special=True)) for text in texts
    )
    for place, vector in enumerate(wanted):
        assert plain["data"][place]["embedding"] == pytest.approx(vector, abs=1e-5)
        raw = base64.b64decode(packed["data"][place]["embedding"])
        assert struct.unpack(f"<{N_EMBD}f", raw) == pytest.approx(vector, abs=1e-5)


def test_a_reranker_orders_documents(bert):
    here, engine = bert(RANK)
    documents = ["red cat", "the dog", "a mat", "blue dog runs"]
    body = {"query": "red cat", "documents": documents, "top_n": 3, "return_documents": True}
    reply = here.client.post("/v1/rerank", json=body).json()
    scores = engine.rerank("red cat", documents)
    best = sorted(range(4), key=lambda place: -scores[place])[:3]
    assert [result["index"] for result in reply["results"]] == best
    assert [result["document"]["text"] for result in reply["results"]] == [documents[b] for b in best]
    assert reply["results"][0]["relevance_score"] == pytest.approx(scores[best[0]], abs=1e-5)


@pytest.mark.parametrize("pooling", [MEAN, RANK])
def test_what_a_model_cannot_do_is_refused(bert, pooling):
    here, _ = bert(pooling)
    asked = {
        "/v1/completions": ASK,
        "/v1/rerank": {"query": "red", "documents": ["cat"]},
        "/v1/embeddings": {"input": "red"},
    }
    statuses = {path: here.client.post(path, json=body).status_code for path, body in asked.items()}
    can = "/v1/rerank" if pooling == RANK else "/v1/embeddings"
    assert statuses[can] == 200
    assert {status for path, status in statuses.items() if path != can} == {400}
    assert '"event":"internal"' not in here.log.getvalue()
