"""Encoders: a BERT of random numbers, made here, embeds and ranks; it cannot generate and says so."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from made_models import CLS, MEAN, N_EMBD, RANK, make_bert

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles


def load(path: Path) -> LlamaEngine:
    return load_engine(ModelFiles(name="bert", paths=(str(path),)), LoadOptions())


@pytest.fixture(params=[MEAN, CLS])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaEngine]:
    with closing(load(make_bert(tmp_path / "bert.gguf", request.param))) as engine:
        yield engine


def test_encoder_embeds_batched_as_unbatched(encoder: LlamaEngine) -> None:
    texts = ["the cat sleeps", "a dog runs", "red", "the blue mat", *(["cat dog"] * 40)]
    together = encoder.embed(texts)
    assert all(math.isclose(sum(x * x for x in v), 1.0, abs_tol=1e-5) for v in together)
    for i in (0, 3, 43):
        assert encoder.embed([texts[i]])[0] == pytest.approx(together[i], abs=2e-3)
    assert together[0] != pytest.approx(together[1], abs=1e-3)


def test_an_encoder_warms_up_and_parks(encoder: LlamaEngine) -> None:
    encoder.warm_up()
    encoder.park()
    encoder.resume(1, b"x")
    assert len(encoder.embed(["cat"])[0]) == N_EMBD


def test_a_ranker_scores_each_document_by_itself(tmp_path: Path) -> None:
    with closing(load(make_bert(tmp_path / "ranker.gguf", RANK, head=True))) as engine:
        assert engine.info.can_rerank
        assert not engine.info.can_embed
        documents = ["the cat sleeps", "a dog runs on the mat", "red"]
        scores = engine.rerank("the cat", documents)
        assert len(set(scores)) == 3
        for document, score in zip(documents, scores, strict=True):
            assert engine.rerank("the cat", [document])[0] == pytest.approx(score, abs=2e-2)
        with pytest.raises(InvalidRequestError) as refused:
            engine.embed(["cat"])
        assert refused.value.hint == "choose an embedding model: `edgeinfer list`"


def test_word_piece_has_one_separator_between_query_and_document(tmp_path: Path) -> None:
    with closing(load(make_bert(tmp_path / "ranker.gguf", RANK, head=True))) as engine:
        query, document = (engine.tokenize(text, add_special=True) for text in ("the cat", "red"))
        assert query[-1] == document[-1]
        assert engine._embedder._pair("the cat", "red") == [*query, *document[1:]]
