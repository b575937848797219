"""Every family of models: what works with each, as the table in docs/guides/models.md says.

WRITE_FAMILIES=1 writes the table's figure from this run.
"""

import os
from pathlib import Path

import pytest
from made_families import FAMILIES, N_CTX, make_family, make_t5

from edgeinfer.errors import EdgeInferError, ModelLoadError
from edgeinfer.models import gguf
from edgeinfer.models.fits import header_shape
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore

from .conftest import ROOMY, ask, heard, load
from .test_kinds import tokens_of

FIGURE = Path(__file__).parents[3] / "docs/figures/families.md"
HEAD = (
    "Each with a model of random numbers, by `WRITE_FAMILIES=1 make test ARGS=tests/runtime/prefix_cache/test_families.py`.\n\n"
    "| family | architecture | batch = alone | prefix reused | edit | found after a restart | longer than its context |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
PROMPT = "The river carries bread and salt to the sea. " * 6
EDIT = PROMPT[:200] + "A clock stops. "
pytestmark = pytest.mark.usefixtures("writes_all")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, tmp_path: Path) -> None:
    path = make_family(tmp_path / "made.gguf", name)
    header = gguf.read_model_header(path)
    assert header.architecture == FAMILIES[name].architecture
    assert header_shape([header]).n_layer == FAMILIES[name].n_layers
    store = BlockStore(tmp_path / "blocks", ROOMY)
    engine = load(path, store, n_ctx=N_CTX)
    prompt = tuple(engine.tokenize(PROMPT))
    alone, usage = heard(engine, ask(prompt, cache_prompt=False))
    assert usage.completion_tokens == 8
    row = [name, f"`{header.architecture}`"]
    row += [_batch(engine, prompt, alone), _again(engine, prompt, alone)]
    row.append(_answer_after_edit(engine))
    assert engine.flush_blocks()
    overflow = _overflow(engine)
    engine.close()
    row += [_answer_after_restart(path, store, prompt, alone), overflow]
    line = "| " + " | ".join(row) + " |"
    if os.environ.get("WRITE_FAMILIES"):
        before = HEAD if name == next(iter(FAMILIES)) else FIGURE.read_text()
        FIGURE.write_text(f"{before.rstrip()}\n{line}\n")
    assert line in FIGURE.read_text().splitlines()


def test_an_encoder_decoder_is_refused_before_it_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        load(make_t5(tmp_path / "t5.gguf"), None, n_ctx=N_CTX)


def same(logprobs: list[object], expected: list[object]) -> bool:
    return tokens_of(logprobs) == tokens_of(expected)


def _batch(engine: LlamaEngine, prompt: tuple[int, ...], alone: list[object]) -> str:
    """Beside three others, whose prompts are other words."""
    other_requests = [
        engine.submit(ask(tuple(engine.tokenize(f"{word} " * 40)), cache_prompt=False, max_tokens=24))
        for word in ("moon", "whale", "ink")
    ]
    logprobs, _ = heard(engine, ask(prompt, cache_prompt=False))
    for other in other_requests:
        list(other)
    assert same(logprobs, alone)
    return "yes"


def _again(engine: LlamaEngine, prompt: tuple[int, ...], alone: list[object]) -> str:
    heard(engine, ask(prompt))
    logprobs, usage = heard(engine, ask(prompt))
    assert same(logprobs, alone)
    assert usage.cached_tokens > 0
    return "all but one token" if usage.cached_tokens == len(prompt) - 1 else "in part"


def _answer_after_edit(engine: LlamaEngine) -> str:
    edited = tuple(engine.tokenize(EDIT))
    expected, _ = heard(engine, ask(edited, cache_prompt=False))
    logprobs, usage = heard(engine, ask(edited))
    assert same(logprobs, expected)
    return "goes on at the edit" if usage.cached_tokens >= 150 else "reads again"


def _answer_after_restart(
    path: Path, store: BlockStore, prompt: tuple[int, ...], alone: list[object]
) -> str:
    engine = load(path, store, n_ctx=N_CTX)
    logprobs, usage = heard(engine, ask(prompt))
    engine.close()
    assert same(logprobs, alone)
    return "yes" if usage.cached_disk_tokens > 0 else "no"


def _overflow(engine: LlamaEngine) -> str:
    """A context of 512 tokens asked for more, where the oldest may be dropped."""
    long = tuple(engine.tokenize("salt and snow, " * 32))
    try:
        _, usage = heard(engine, ask(long, max_tokens=80, overflow="shift"))
    except EdgeInferError:
        return "refused"
    return "drops the oldest" if usage.completion_tokens == 80 else "ends there"
