"""Speculative decoding, embeddings and reranking over HTTP, on the real engine."""

import base64
import struct

import pytest
from made_models import MEAN, N_EMBD, RANK, make_bert

ASK = {"prompt": "A short note about rivers:", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.mark.model
def test_speculation_changes_nothing_but_the_counts(real):
    asked = ASK | {"prompt": "one two three " * 8}
    modes = [asked | {"speculative": mode} for mode in ("off", "ngram")]
    off, ngram = (real.post("/v1/completions", body).json() for body in modes)
    assert off["choices"][0]["text"] == ngram["choices"][0]["text"]
    assert off["timings"]["draft_n"] == 0
    assert ngram["timings"]["draft_n"] >= ngram["timings"]["draft_n_accepted"] > 0
    scrape = real.get("/metrics").text
    assert 'edgeinfer_spec_decode_num_accepted_tokens_total{model_name="smollm2"' in scrape


@pytest.fixture
def bert(serve, load_model, tmp_path):
    """Return `start(pooling)`, which serves a small encoder or reranker; it returns the engine too."""

    def start(pooling: int):
        path = make_bert(tmp_path / "bert.gguf", pooling, head=pooling == RANK)
        engine = load_model(path, "bert", n_ctx=128)
        return serve(engine), engine

    return start


def test_an_encoder_embeds_as_numbers_and_as_base64(bert):
    live_server, engine = bert(MEAN)
    texts = ["red cat", "the dog sleeps on a mat"]
    plain = live_server.post("/v1/embeddings", {"input": texts}).json()
    packed = live_server.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"}).json()
    vectors = engine.embed(texts)
    n_tokens = sum(len(engine.tokenize(text, add_special=True)) for text in texts)
    assert plain["usage"]["prompt_tokens"] == n_tokens
    for index, vector in enumerate(vectors):
        assert plain["data"][index]["embedding"] == pytest.approx(vector, abs=1e-5)
        raw = base64.b64decode(packed["data"][index]["embedding"])
        assert struct.unpack(f"<{N_EMBD}f", raw) == pytest.approx(vector, abs=1e-5)


def test_a_reranker_orders_documents(bert):
    live_server, engine = bert(RANK)
    documents = ["red cat", "the dog", "a mat", "blue dog runs"]
    body = {"query": "red cat", "documents": documents, "top_n": 3, "return_documents": True}
    reply = live_server.post("/v1/rerank", body).json()
    scores = engine.rerank("red cat", documents)
    best = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [result["index"] for result in reply["results"]] == best
    assert [result["document"]["text"] for result in reply["results"]] == [documents[b] for b in best]
    assert reply["results"][0]["relevance_score"] == pytest.approx(scores[best[0]], abs=1e-5)


@pytest.mark.parametrize("pooling", [MEAN, RANK])
def test_unsupported_task_of_a_model_is_refused(bert, pooling):
    live_server, _ = bert(pooling)
    asked = {"/v1/completions": ASK, "/v1/embeddings": {"input": "red"}}
    asked["/v1/rerank"] = {"query": "red", "documents": ["cat"]}
    statuses = {path: live_server.post(path, body).status_code for path, body in asked.items()}
    can = "/v1/rerank" if pooling == RANK else "/v1/embeddings"
    assert statuses[can] == 200
    assert {status for path, status in statuses.items() if path != can} == {400}
    assert '"event":"internal"' not in live_server.log.getvalue()
