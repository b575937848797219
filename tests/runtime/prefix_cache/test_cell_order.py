"""Cells in any order: sums are in the order in which they were written, so no bit depends on where they lie."""

from contextlib import closing
from pathlib import Path

import pytest

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore

from .. import conftest as engines
from .conftest import ask, heard, load, store_and_drop, text


def drop_others(engine: LlamaEngine, tokens: tuple[int, ...]) -> None:
    """Free the cells of every idle sequence that does not begin like these."""
    kv = engine._core.kv
    for cached in [c for c in kv.cached_sequences if tuple(c.tokens[:100]) != tokens[:100]]:
        kv.drop(cached)


@pytest.mark.usefixtures("writes_all")
def test_transposed_values_of_cells_out_of_order_come_back(store: BlockStore, smollm2: Path) -> None:
    with closing(load(smollm2, store, flash_attention="off")) as engine:
        tokens = tuple(engine.tokenize(text(900)))[:900]
        heard(engine, ask(text(600, 3000), max_tokens=0))
        heard(engine, ask(tokens[:500], max_tokens=0))
        engine.between_steps(lambda: drop_others(engine, tokens))
        logprobs = engines.answer(engine, ask(tokens)).logprobs
        store_and_drop(engine)
        again = engines.answer(engine, ask(tokens))
        assert again.finish.usage.cached_disk_tokens >= 500
        near = pytest.approx(logprobs[0].chosen.logprob, abs=0.1)
        assert again.logprobs[0].chosen.logprob == near


@pytest.mark.usefixtures("writes_all")
@pytest.mark.parametrize(
    ("model", "kv_type"),
    [
        ("smollm2", "f16"),
        pytest.param("smollm2", "q8_0", marks=pytest.mark.needs("time")),
        ("gemma3", "f16"),
    ],
)
def test_a_prompt_behind_and_below_its_prefix_has_the_bits_of_an_empty_cache(
    model: str, kv_type: str, store: BlockStore, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    with closing(load(path, store, kv_type=kv_type)) as engine:
        tokens = tuple(engine.tokenize(text(900)))[:900]
        alone, _ = heard(engine, ask(tokens, cache_prompt=False))
        heard(engine, ask(text(600, 3000), max_tokens=0))
        heard(engine, ask(tokens[:500], max_tokens=0))
        engine.between_steps(lambda: drop_others(engine, tokens))
        logprobs, usage = heard(engine, ask(tokens))
        (cached,) = engine._core.kv.cached_sequences
        assert usage.cached_tokens >= 500
        assert cached.cells != sorted(cached.cells)
        assert logprobs == alone
        store_and_drop(engine)
        logprobs, usage = heard(engine, ask(tokens))
        assert usage.cached_disk_tokens >= 500
        assert logprobs == alone
