"""A hybrid model restores checkpoints: edits, other answers and dropped reasoning reuse a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from made_decoders import make_lfm2

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.kv_cache.recurrent_checkpoints import Checkpoints, tokens_to_next_checkpoint

from .conftest import ask, heard, load, text


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return make_lfm2(tmp_path_factory.mktemp("hybrid") / "lfm2.gguf", smollm2)


@pytest.fixture
def engine(hybrid: Path) -> Iterator[LlamaEngine]:
    with closing(load(hybrid, None, kv_type="q8_0", n_ctx=4096)) as opened:
        yield opened


def test_checkpoints_are_saved_during_a_long_prefill(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(2600)))
    assert len(tokens) > 2300
    heard(engine, ask(tokens, max_tokens=1))
    edited = tokens[:2200] + tuple(engine.tokenize("something else"))
    _, usage = heard(engine, ask(edited))
    assert usage.cached_tokens == 2048


def test_running_conversation_shares_its_checkpoints(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(500)))
    heard(engine, ask(tokens))
    streams = [engine.submit(ask(tokens, max_tokens=30)) for _ in range(3)]
    answers = [[e for e in stream if hasattr(e, "text")] for stream in streams]
    assert answers[0] == answers[1] == answers[2]


class _States:
    def read_checkpoint(self, seq_id: int) -> memoryview:
        return memoryview(bytes(10))

    def write_checkpoint(self, seq_id: int, state: memoryview) -> bool:
        return True


def test_checkpoints_are_bounded_and_the_oldest_evicted() -> None:
    checkpoints = Checkpoints(_States(), most_bytes=25)
    one, two = [], []  # type: ignore[var-annotated]
    checkpoints.save(one, 0, 5)
    checkpoints.save(one, 0, 5)
    checkpoints.save(one, 0, 9)
    checkpoints.save(two, 1, 7)
    assert [p.n_tokens for p in one] == [9]
    assert [p.n_tokens for p in two] == [7]
    assert checkpoints.latest_before(one, 8) is None
    checkpoints.drop_after(one)
    checkpoints.save(two, 1, 8)
    assert [p.n_tokens for p in two] == [7, 8]


@pytest.mark.parametrize(
    ("n_past", "n_tokens", "expected"),
    [(0, 10, 10), (0, 100, 99), (99, 100, 1), (0, 5000, 2048), (2000, 5000, 48), (90, 100, 10)],
)
def test_steps_end_at_checkpoints(n_past: int, n_tokens: int, expected: int) -> None:
    assert tokens_to_next_checkpoint(n_past, n_tokens) == expected
