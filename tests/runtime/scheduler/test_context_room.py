"""How long an automatic context is, in which KV type, and what its memory costs before it is used."""

import contextlib
import ctypes
import os
from contextlib import closing
from pathlib import Path

import pytest
from made_models import make_llama
from msgspec.structs import replace
from other_processes import private_bytes

from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.events import Logprob
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama import model as loading
from edgeinfer.runtime.llama.weights import open_model
from edgeinfer.runtime.memory_plan import MemoryPlan, make_plan
from edgeinfer.runtime.model_shape import Shape, make_shape
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles

from ..conftest import answer, ask, load, machine

GIB = 1 << 30
MIB = 1 << 20


def llama_shape(n_layer: int, n_embd: int, weights_bytes: int, n_ctx_train: int) -> Shape:
    """The shape of a dense model with eight KV heads of 128."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": n_layer,
        "llama.context_length": n_ctx_train,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": 4 * n_embd,
        "llama.attention.head_count": n_embd // 128,
        "llama.attention.head_count_kv": 8,
        "llama.attention.key_length": 128,
        "llama.attention.value_length": 128,
    }
    return make_shape(metadata, n_vocab=128_256, n_params=0, weights_bytes=weights_bytes)


EIGHT = llama_shape(32, 4096, 4_920_000_000, 131_072)
FOUR = llama_shape(36, 2560, 2_500_000_000, 40_960)


def plan_for(shape: Shape, memory_gib: float, **options: object) -> MemoryPlan:
    return make_plan(shape, LoadOptions(**options), machine(int(memory_gib * GIB)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "memory_gib", "kv_type", "n_ctx"),
    [  # the table of docs/concepts/scheduling.md
        (FOUR, 24, "f16", 40_960),
        (FOUR, 16, "f16", 40_960),
        (FOUR, 8, "q8_0", 37_376),
        (EIGHT, 24, "f16", 78_336),
        (EIGHT, 16, "f16", 45_568),
        (EIGHT, 8, "q8_0", 24_320),
    ],
)
def test_an_agents_preamble_fits(shape: Shape, memory_gib: float, kv_type: str, n_ctx: int) -> None:
    plan = plan_for(shape, memory_gib)
    assert (plan.kv_type.value, plan.refusal) == (kv_type, "")
    assert plan.n_ctx.value == n_ctx
    assert plan.buffers.total_bytes < memory_gib * GIB
    assert plan.buffers.kv_type == kv_type
    assert plan.least_kv_bytes <= GIB


def test_kv_type_is_chosen_with_its_reason() -> None:
    assert plan_for(EIGHT, 8, kv_type="f16").kv_type == Chosen("f16", "as asked")
    assert "room for" in plan_for(EIGHT, 8).kv_type.reason
    assert "off" in plan_for(EIGHT, 8, flash_attention="off").kv_type.reason
    odd = replace(EIGHT, can_quantize_kv=False)
    assert plan_for(odd, 8).kv_type.value == "f16"


def test_requested_context_decides_the_kv_type() -> None:
    assert plan_for(EIGHT, 8, n_ctx=8192).kv_type.value == "f16"
    long = plan_for(EIGHT, 8, n_ctx=28_672)
    assert (long.kv_type.value, long.refusal) == ("q8_0", "")
    assert long.least_kv_bytes == long.buffers.kv_bytes
    assert plan_for(EIGHT, 8, n_ctx=131_072).refusal


@pytest.mark.parametrize(("lengths", "rank"), [((80, 80), 0), ((64, 40), 0), ((128, 128), 512)])
def test_a_cache_without_whole_blocks_is_not_quantized(lengths: tuple[int, int], rank: int) -> None:
    metadata = {
        "general.architecture": "x",
        "x.attention.head_count": 8,
        "x.attention.key_length": lengths[0],
        "x.attention.value_length": lengths[1],
        "x.attention.kv_lora_rank": rank,
    }
    assert not make_shape(metadata, n_vocab=1, n_params=0, weights_bytes=0).can_quantize_kv


def test_the_trained_context_is_chosen(smollm2: Path) -> None:
    with closing(load_engine(ModelFiles(name="s", paths=(str(smollm2),)), LoadOptions())) as engine:
        info = engine.info
        assert info.n_ctx == info.n_ctx_train == 8192
        assert info.choices["kv_type"].value == "f16"
        assert "fit" in info.choices["kv_type"].reason


@pytest.mark.parametrize(("n_ctx", "n_warnings"), [(256, 0), (300, 1)])
def test_a_context_beyond_the_training_is_warned_of(
    tmp_path: Path, n_ctx: int, n_warnings: int
) -> None:
    files = ModelFiles(name="m", paths=(str(make_llama(tmp_path / "m.gguf", 256)),))
    with closing(load_engine(files, LoadOptions(n_ctx=n_ctx, n_parallel=1))) as engine:
        assert len(engine.info.warnings) == n_warnings
        assert all("trained on 256 tokens" in warning for warning in engine.info.warnings)


def test_cells_take_memory_when_they_are_used(smollm2: Path) -> None:
    llama = libllama.lib()
    model = open_model((str(smollm2),))
    limits = {"n_batch": 512, "n_seq_max": 4, "n_threads": 2}
    params = loading.context_params(LoadOptions(), n_cells=16_384, **limits)
    # first use
    loading.make_context(model, loading.context_params(LoadOptions(), n_cells=2048, **limits))
    before = private_bytes(os.getpid())

    def taken_bytes() -> int:
        return private_bytes(os.getpid()) - before

    context, lines, _ = loading.make_context(model, params)
    try:
        assert sum("KV buffer size" in line for line in lines) == 1
        assert taken_bytes() < 64 * MIB  # of 360
        tokens = (ctypes.c_int * 512)(*([5] * 512))
        assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, 512)) == 0
        assert taken_bytes() > 8 * MIB  # 512 tokens of 23 KB
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        assert taken_bytes() > 350 * MIB  # a second clearing writes zeros: mapped files too
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def first_tokens(path: Path) -> list[Logprob]:
    with closing(load(path, n_parallel=1)) as engine:
        return [token.chosen for token in answer(engine, ask(max_tokens=16, logprobs=0)).logprobs]


def test_bits_are_those_of_written_zeros(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = first_tokens(smollm2)
    monkeypatch.setattr(loading, "sparse_buffers", lambda: contextlib.nullcontext([]))
    assert given_back == first_tokens(smollm2)
    assert len(given_back) == 16
