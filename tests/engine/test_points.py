"""A hybrid model goes back to points of its state: edits, other answers and dropped reasoning reuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.blocks.store import BlockStore
from edgeinfer.runtime.decoding.blocks import block_writing, restore
from edgeinfer.runtime.decoding.cache.points import Points, tokens_to_next
from edgeinfer.runtime.engine import LlamaEngine

from .test_blocks import ROOMY, ask, heard, load, text

_WIDTH = 64
_FF = 128
_HEADS = 2
_HEAD = 32
_LAYERS = 4
_ATTENTION = (1, 3)


def write_hybrid(path: Path, tokenizer: Path) -> None:
    """A tiny model of LFM2's shape with random weights: short convolutions, and attention in between."""
    rng = np.random.default_rng(5)

    def random(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    w = gguf.GGUFWriter(path, "lfm2")
    n_vocab = 0
    for name, entry in gguf.GGUFReader(tokenizer).fields.items():
        if name.startswith("tokenizer.") and "chat_template" not in name:
            value, kind = entry.contents(), entry.types[0]
            n_vocab = len(value) if name == "tokenizer.ggml.tokens" else n_vocab
            sub = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            w.add_key_value(name, value, kind, sub_type=sub)
    w.add_context_length(4096)
    w.add_embedding_length(_WIDTH)
    w.add_block_count(_LAYERS)
    w.add_feed_forward_length(_FF)
    w.add_head_count(_HEADS)
    w.add_head_count_kv([int(i in _ATTENTION) for i in range(_LAYERS)])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e4)
    w.add_vocab_size(n_vocab)
    w.add_file_type(0)
    w.add_shortconv_l_cache(3)
    w.add_tensor("token_embd.weight", random(n_vocab, _WIDTH) * 8)
    w.add_tensor("output.weight", random(n_vocab, _WIDTH))
    w.add_tensor("token_embd_norm.weight", np.ones(_WIDTH, np.float32))
    for i in range(_LAYERS):
        shapes = {"ffn_gate": (_FF, _WIDTH), "ffn_up": (_FF, _WIDTH), "ffn_down": (_WIDTH, _FF)}
        norms = {"attn_norm": _WIDTH, "ffn_norm": _WIDTH}
        if i in _ATTENTION:
            shapes |= {"attn_q": (_HEADS * _HEAD, _WIDTH), "attn_output": (_WIDTH, _HEADS * _HEAD)}
            shapes |= {"attn_k": (_HEAD, _WIDTH), "attn_v": (_HEAD, _WIDTH)}
            norms |= {"attn_q_norm": _HEAD, "attn_k_norm": _HEAD}
        else:
            shapes |= {"shortconv.conv": (_WIDTH, 3), "shortconv.in_proj": (3 * _WIDTH, _WIDTH)}
            shapes |= {"shortconv.out_proj": (_WIDTH, _WIDTH)}
        for name, shape in shapes.items():
            w.add_tensor(f"blk.{i}.{name}.weight", random(*shape))
        for name, n in norms.items():
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(n, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "lfm2.gguf"
    write_hybrid(path, smollm2)
    return path


@pytest.fixture
def engine(hybrid: Path) -> Iterator[LlamaEngine]:
    opened = load(hybrid, None, kv_type="q8_0", n_ctx=4096)
    yield opened
    opened.close()


def test_the_same_question_again_computes_one_token(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(600)))
    first, _ = heard(engine, ask(tokens))
    again, usage = heard(engine, ask(tokens))
    assert usage.cached_tokens == len(tokens) - 1
    assert again == first


def test_dropped_reasoning_and_edits_go_back_to_a_point(engine: LlamaEngine) -> None:
    question = tuple(engine.tokenize(text(600)))
    heard(engine, ask(question, max_tokens=40))
    without = question + tuple(engine.tokenize("the answer alone, and another question"))
    found, usage = heard(engine, ask(without))
    assert usage.cached_tokens == len(question) - 1
    alone, _ = heard(engine, ask(without, cache_prompt=False))
    assert [t.chosen.token_id for t in found] == [t.chosen.token_id for t in alone]  # type: ignore[attr-defined]


def test_points_are_taken_on_the_way_through_a_long_prompt(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(2600)))
    assert len(tokens) > 2300
    heard(engine, ask(tokens, max_tokens=1))
    edited = tokens[:2200] + tuple(engine.tokenize("something else"))
    _, usage = heard(engine, ask(edited))
    assert usage.cached_tokens == 2048


def test_a_running_conversation_shares_its_points(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(500)))
    heard(engine, ask(tokens))
    streams = [engine.submit(ask(tokens, max_tokens=30)) for _ in range(3)]
    answers = [[e for e in stream if hasattr(e, "text")] for stream in streams]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_fresh_engine_goes_on_from_a_point_of_the_store(
    hybrid: Path, tmp_path: Path, kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_PATIENCE_S", 600.0)
    monkeypatch.setattr(block_writing, "_WORTH_WRITING_S", 0.0)
    store = BlockStore(tmp_path / "blocks", ROOMY)
    engine = load(hybrid, store, kv_type=kv_type)
    question = tuple(engine.tokenize(text(600)))
    assert len(question) > 600
    question = question[:600]
    heard(engine, ask(question, max_tokens=50))
    assert engine.flush_blocks()
    assert engine._scheduler.prefixes.blocks is not None
    assert engine._scheduler.prefixes.blocks.proof.found == "exact"
    engine._scheduler.prefixes.blocks = None
    other = question + tuple(engine.tokenize("the answer without its reasoning, and a question"))
    wanted = [heard(engine, ask(request))[0] for request in (question, other)]
    engine.close()
    for request, answer in zip((question, other), wanted, strict=True):
        engine = load(hybrid, store, kv_type=kv_type)
        found, usage = heard(engine, ask(request))
        assert usage.cached_disk_tokens == 599
        assert found == answer
        engine.close()


class _States:
    def read_point(self, seq_id: int) -> memoryview:
        return memoryview(bytes(10))

    def write_point(self, seq_id: int, state: memoryview) -> bool:
        return True


def test_points_are_bounded_and_the_oldest_go() -> None:
    points = Points(_States(), most_bytes=25)
    one, two = [], []  # type: ignore[var-annotated]
    points.take(one, 0, 5)
    points.take(one, 0, 5)
    points.take(one, 0, 9)
    points.take(two, 1, 7)
    assert [p.n_tokens for p in one] == [9]
    assert [p.n_tokens for p in two] == [7]
    assert points.best(one, 8) is None
    points.forget(one)
    points.take(two, 1, 8)
    assert [p.n_tokens for p in two] == [7, 8]


@pytest.mark.parametrize(
    ("n_past", "n_tokens", "expected"),
    [(0, 10, 10), (0, 100, 99), (99, 100, 1), (0, 5000, 2048), (2000, 5000, 48), (90, 100, 10)],
)
def test_steps_end_where_points_are_taken(n_past: int, n_tokens: int, expected: int) -> None:
    assert tokens_to_next(n_past, n_tokens) == expected
