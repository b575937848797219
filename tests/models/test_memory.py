"""Memory estimates agree with llama.cpp's buffers for both real models."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from other_processes import run_python

from edgeinfer.cli.main import main
from edgeinfer.models.fits import header_plan, header_shape
from edgeinfer.models.gguf import GgufHeader, TensorInfo, read_model_header
from edgeinfer.platform.machine import Machine, Memory
from edgeinfer.runtime.memory_plan import MemoryPlan
from edgeinfer.runtime.model_shape import Shape, make_buffers
from edgeinfer.runtime.options import LoadOptions

#: Prints the sizes (MiB) that llama.cpp logs: [weights, [KV cache, compute and output] per context].
_BUFFERS = """
import json, re, sys
from edgeinfer.runtime.llama import libllama
llama = libllama.lib()
def told(lines, pattern):
    size = re.compile(pattern + r"\\s*=\\s*([\\d.]+) MiB")
    return sum(float(m[1]) for m in map(size.search, lines) if m)
with libllama.listening() as lines:
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    model = llama.llama_model_load_from_file(sys.argv[1].encode(), params)
out = [told(lines, "model buffer size"), []]
for n_ctx, n_seq, n_ubatch, n_outputs, kind in json.loads(sys.argv[2]):
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = n_ctx, n_seq, n_ubatch, n_ubatch
    params.n_outputs_max, params.type_k, params.type_v = n_outputs, kind, kind
    params.kv_unified, params.swa_full, params.n_threads = True, True, 1
    with libllama.listening() as lines:
        context = llama.llama_init_from_model(model, params)
    compute = told(lines, "compute buffer size") + told(lines, "output buffer size")
    out[1].append([told(lines, "KV buffer size"), compute])
    llama.llama_free(context)
print(json.dumps(out))
"""
_KINDS = {"f16": 1, "q8_0": 8, "q4_0": 2}
#: (context, sequences, micro-batch, outputs, KV type)
SHAPES = [
    (512, 1, 512, 512, "f16"),
    (8192, 1, 512, 512, "f16"),
    (8192, 8, 512, 64, "f16"),
    (8192, 1, 512, 16, "q8_0"),
    (8192, 1, 512, 16, "q4_0"),
    (32768, 1, 512, 16, "f16"),
    (32768, 4, 128, 16, "f16"),
]


def llama_buffers(model: Path) -> list:
    shapes = json.dumps([[*shape[:4], _KINDS[shape[4]]] for shape in SHAPES])
    return json.loads(run_python(_BUFFERS, model, shapes))


@pytest.mark.model
@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_estimate_agrees_with_llama_cpp(which: str, request: pytest.FixtureRequest) -> None:
    """Compare weights and KV cache exactly, compute buffers within 10 %."""
    model = request.getfixturevalue(which)
    shape = header_shape([read_model_header(model)])
    weights, contexts = llama_buffers(model)
    assert shape.weights_bytes / 2**20 == pytest.approx(weights, abs=0.02)
    for case, (kv, compute) in zip(SHAPES, contexts, strict=True):
        n_ctx, n_seq, n_ubatch, n_outputs, kind = case
        buffers = make_buffers(
            shape, n_ctx, kind, n_seq_max=n_seq, n_ubatch=n_ubatch, n_outputs=n_outputs
        )
        assert buffers.kv_bytes / 2**20 == pytest.approx(kv, abs=0.02), case
        assert buffers.compute_bytes / 2**20 == pytest.approx(compute, rel=0.10), case


_ENGINE = """
import json, sys
from edgeinfer.models.reference import resolve
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions
engine = load_engine(resolve(sys.argv[1]).files(), LoadOptions(), None)
info = engine.info
print(json.dumps([info.n_ctx, info.n_parallel, info.weights_bytes, info.kv_bytes, info.compute_bytes]))
engine.close()
"""


@pytest.mark.model
@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_show_agrees_with_the_loaded_engine(
    which: str, request: pytest.FixtureRequest, as_json
) -> None:
    model = str(request.getfixturevalue(which))
    *loaded, kv, compute = json.loads(run_python(_ENGINE, model))
    memory = as_json("show", model)["memory"]
    estimate = memory["estimate"]
    assert [memory["n_ctx"], memory["n_parallel"], estimate["weights_bytes"]] == loaded
    assert estimate["kv_bytes"] == pytest.approx(kv, abs=1 << 15)
    assert estimate["compute_bytes"] == pytest.approx(compute, rel=0.15)


@pytest.mark.model
def test_show_says_how_fast_a_model_larger_than_memory_is(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    memory = Memory(total_bytes=1 << 30, available_bytes=80 << 20, reason="made up")
    machine = Machine(physical_cores=2, logical_cpus=2, quota=None, memory=memory)
    monkeypatch.setattr("edgeinfer.cli.verbs.show.read_machine", lambda: machine)
    monkeypatch.setattr("edgeinfer.cli.verbs.show.read_rate", lambda path: 0.0)
    assert main(["show", str(smollm2)]) == 0
    out = capsys.readouterr().out
    assert "83.9 MB available: it runs from the disk" in out
    assert "Expect about 5.2 tokens/s: 96.6 MB a token at 500.0 MB/s (assumed)" in out


EMPTY = GgufHeader(
    path="", version=3, file_bytes=0, alignment=32, data_offset=0, tensors=(), metadata={}
)


def header_with(**metadata: object) -> GgufHeader:
    base = {"general.architecture": "x", "x.block_count": 4}
    base |= {"x.embedding_length": 64, "x.attention.head_count": 8}
    return replace(EMPTY, metadata={**base, **metadata})


def elements(**metadata: object) -> int:
    return header_shape([header_with(**metadata)]).kv_elements


def test_head_counts_follow_from_the_header() -> None:
    assert elements() == 4 * (64 + 64)
    assert elements(**{"x.attention.head_count_kv": 2}) == 4 * (16 + 16)
    assert elements(**{"x.attention.head_count_kv": (2, 0, 4, 0)}) == 2 * 16 + 2 * 32
    numbers = {"head_count_kv": 1, "key_length": 24, "value_length": 8}
    lengths = {f"x.attention.{name}": n for name, n in numbers.items()}
    assert elements(**lengths) == 4 * (24 + 8)
    assert elements(**{"x.attention.shared_kv_layers": 3}) == 64 + 64
    assert elements(**lengths, **{"x.attention.kv_lora_rank": 512}) == 4 * 24


def test_lengths_of_heads_are_those_of_every_kind_of_attention() -> None:
    def lengths(**metadata: object) -> tuple[int, ...]:
        return header_shape([header_with(**metadata)]).head_lengths

    assert lengths() == (8, 8)
    assert lengths(**{"x.attention.head_count": (0, 4)}) == (16, 16)
    assert lengths(**{"x.attention.head_count": 0}) == (0, 0)
    assert lengths(**{"x.attention.value_length": 16, "x.attention.key_length_swa": 32}) == (8, 16, 32)
    latent = {"x.attention.kv_lora_rank": 512, "x.attention.key_length_mla": 192}
    assert lengths(**latent) == (8, 8, 512, 192)


def test_sliding_windows_follow_from_the_header() -> None:
    def windows(**metadata: object) -> bool:
        return header_shape([header_with(**metadata)]).has_windows

    assert not windows()
    assert not windows(**{"x.attention.sliding_window": 32})
    pattern = {"x.attention.sliding_window": 32, "x.attention.sliding_window_pattern": (False, True)}
    assert windows(**pattern)
    assert windows(**{"general.architecture": "gemma3", "gemma3.attention.sliding_window": 512})
    assert windows(**{"general.architecture": "gemma2"})


def test_recurrent_layers_keep_a_state_instead() -> None:
    state = {"x.ssm.inner_size": 128, "x.ssm.state_size": 16, "x.ssm.conv_kernel": 4}
    mixed = header_shape([header_with(**{"x.attention.head_count_kv": (0, 2, 0, 2), **state})])
    assert mixed.is_recurrent
    assert mixed.kv_elements == 2 * (16 + 16)
    assert mixed.state_elements == 2 * (3 * 128 + 16 * 128)
    short = {"x.shortconv.l_cache": 3, "x.attention.head_count_kv": (0, 2, 0, 2)}
    assert header_shape([header_with(**short)]).state_elements == 2 * 2 * 64


def test_token_reads_its_experts_and_no_others() -> None:
    experts = {"x.expert_count": 8, "x.expert_used_count": 2, "x.expert_feed_forward_length": 100}
    tensor = TensorInfo(name="all", type="F16", shape=(200_000,), offset=0, size_bytes=400_000)
    header = replace(header_with(**experts), tensors=(tensor,))
    # 4 layers of 8 experts of 3 matrices of 64 x 100 are 614,400 parameters: more than there are
    assert header_shape([header]).weights_bytes_per_token == 100_000
    assert header_shape([replace(header_with(), tensors=(tensor,))]) == Shape(
        weights_bytes=400_000,
        weights_bytes_per_token=400_000,
        file_type=-1,
        n_ctx_train=0,
        n_vocab=0,
        n_embd=64,
        n_ff=0,
        n_query=64,
        kv_rows=(64,) * 8,
        head_lengths=(8, 8),
        can_quantize_kv=False,
        n_layer=4,
    )


def test_absurd_headers_do_not_break_it() -> None:
    for header in (
        EMPTY,
        header_with(**{"x.attention.head_count": 0}),
        header_with(**{"x.attention.head_count": "eight"}),
        header_with(**{"x.feed_forward_length": (), "x.attention.head_count_kv": ()}),
    ):
        assert plan_of(header, 1 << 33).buffers.kv_bytes == 0


def plan_of(header: GgufHeader, available_bytes: int, **options: object) -> MemoryPlan:
    memory = Memory(total_bytes=1 << 34, available_bytes=available_bytes, reason="made up")
    machine = Machine(physical_cores=4, logical_cpus=8, quota=None, memory=memory)
    return header_plan([header], LoadOptions(**options), machine)[1]  # type: ignore[arg-type]
