"""Encoders: a BERT of random numbers, made here, embeds and ranks; it cannot generate and says so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest

N_EMBD, N_FF, N_LAYER, N_CTX = 64, 128, 2, 128
WORDS = ["red", "blue", "cat", "dog", "runs", "sleeps", "on", "mat", "the", "a"]
MEAN, CLS, RANK = 1, 2, 4


def make_bert(path: Path, pooling: int, *, head: bool = False) -> Path:
    rng = np.random.default_rng(7)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{word}" for word in WORDS)]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [1] * len(WORDS))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    if head:
        writer.add_classifier_output_labels(["relevance"])

    def add(name: str, *shape: int, scale: float = 0.3, offset: float = 0.0) -> None:
        writer.add_tensor(name, (offset + rng.normal(0, scale, shape)).astype(np.float32))

    def norm(name: str) -> None:
        add(f"{name}.weight", N_EMBD, scale=0.01, offset=1.0)
        add(f"{name}.bias", N_EMBD, scale=0.01)

    add("token_embd.weight", len(tokens), N_EMBD)
    add("token_types.weight", 2, N_EMBD)
    add("position_embd.weight", N_CTX, N_EMBD)
    norm("token_embd_norm")
    for layer in range(N_LAYER):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{name}.weight", N_EMBD, N_EMBD)
            add(f"{block}.{name}.bias", N_EMBD, scale=0.01)
        norm(f"{block}.attn_output_norm")
        add(f"{block}.ffn_up.weight", N_FF, N_EMBD)
        add(f"{block}.ffn_up.bias", N_FF, scale=0.01)
        add(f"{block}.ffn_down.weight", N_EMBD, N_FF)
        add(f"{block}.ffn_down.bias", N_EMBD, scale=0.01)
        norm(f"{block}.layer_output_norm")
    if head:
        add("cls.weight", N_EMBD, N_EMBD)
        add("cls.bias", N_EMBD, scale=0.01)
        add("cls.output.weight", 1, N_EMBD)
        add("cls.output.bias", 1, scale=0.01)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> LlamaEngine:
    return load_engine(ModelFiles(name="bert", paths=(str(path),)), LoadOptions())


@pytest.fixture(params=[MEAN, CLS])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaEngine]:
    engine = load(make_bert(tmp_path / "bert.gguf", request.param))
    yield engine
    engine.close()


def test_an_encoder_embeds_alone_and_in_batches_alike(encoder: LlamaEngine) -> None:
    texts = ["the cat sleeps", "a dog runs", "red", "the blue mat", *(["cat dog"] * 40)]
    together = encoder.embed(texts)
    assert all(math.isclose(sum(x * x for x in v), 1.0, abs_tol=1e-5) for v in together)
    for i in (0, 3, 43):
        assert encoder.embed([texts[i]])[0] == pytest.approx(together[i], abs=2e-3)
    assert together[0] != pytest.approx(together[1], abs=1e-3)


def test_an_encoder_does_not_generate_and_says_so(encoder: LlamaEngine) -> None:
    assert encoder.info.can_embed
    with pytest.raises(InvalidRequestError) as refused:
        encoder.submit(GenerateRequest(prompt="cat"))
    assert refused.value.param == "model"


def test_an_encoder_warms_up_and_parks(encoder: LlamaEngine) -> None:
    encoder.warm_up()
    encoder.park()
    encoder.resume(1, b"x")
    assert len(encoder.embed(["cat"])[0]) == N_EMBD


def test_a_ranker_scores_each_document_by_itself(tmp_path: Path) -> None:
    engine = load(make_bert(tmp_path / "ranker.gguf", RANK, head=True))
    try:
        assert engine.info.can_rerank
        assert not engine.info.can_embed
        documents = ["the cat sleeps", "a dog runs on the mat", "red"]
        scores = engine.rerank("the cat", documents)
        assert len(set(scores)) == 3
        for document, score in zip(documents, scores, strict=True):
            assert engine.rerank("the cat", [document])[0] == pytest.approx(score, abs=2e-2)
        with pytest.raises(InvalidRequestError):
            engine.embed(["cat"])
    finally:
        engine.close()
