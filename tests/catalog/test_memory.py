"""The memory estimate against llama.cpp's own buffers on both real models, and the machine's memory
against a made-up one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.catalog.gguf import GgufHeader, check
from edgeinfer.catalog.memory import estimate, layers, machine_memory
from edgeinfer.cli import main

#: Makes contexts and prints what llama.cpp says of its buffers, in MiB: [weights, [kv, compute +
#: output] per context].
_BUFFERS = """
import json, re, sys
from edgeinfer.runtime import libllama
llama = libllama.lib()
def told(lines, pattern):
    return sum(float(m[1]) for line in lines for m in [re.search(pattern + r"\\s*=\\s*([\\d.]+) MiB", line)] if m)
with libllama.listening() as lines:
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    model = llama.llama_model_load_from_file(sys.argv[1].encode(), params)
out = [told(lines, "model buffer size"), []]
for n_ctx, n_seq, n_ubatch, n_outputs, kind in json.loads(sys.argv[2]):
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = n_ctx, n_seq, n_ubatch, n_ubatch
    params.n_outputs_max, params.type_k, params.type_v = n_outputs, kind, kind
    params.kv_unified, params.swa_full, params.n_threads = True, False, 1
    with libllama.listening() as lines:
        context = llama.llama_init_from_model(model, params)
    out[1].append([told(lines, "KV buffer size"), told(lines, "compute buffer size") + told(lines, "output buffer size")])
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
    ran = subprocess.run(
        [sys.executable, "-c", _BUFFERS, str(model), shapes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.model
@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_the_estimate_agrees_with_llama_cpp(which: str, request: pytest.FixtureRequest) -> None:
    """Weights and KV cache to the printed digit; compute within 10 %."""
    model = request.getfixturevalue(which)
    header = check(model)
    weights, contexts = llama_buffers(model)
    assert header.weights_bytes / 2**20 == pytest.approx(weights, abs=0.02)
    for shape, (kv, compute) in zip(SHAPES, contexts, strict=True):
        n_ctx, n_seq, n_ubatch, n_outputs, kind = shape
        ours = estimate(header, n_ctx, kind, n_parallel=n_seq, n_ubatch=n_ubatch, n_outputs=n_outputs)
        assert ours.kv_bytes / 2**20 == pytest.approx(kv, abs=0.02), shape
        assert ours.compute_bytes / 2**20 == pytest.approx(compute, rel=0.10), shape


_ENGINE = """
import json, sys
from edgeinfer.catalog.store import model_files
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions
engine = load_engine(model_files(sys.argv[1]), LoadOptions(), None)
info = engine.info
print(json.dumps([info.n_ctx, info.n_parallel, info.weights_bytes, info.kv_bytes, info.compute_bytes]))
engine.close()
"""


@pytest.mark.model
@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_show_agrees_with_the_loaded_engine(which: str, request: pytest.FixtureRequest, capsys) -> None:
    model = str(request.getfixturevalue(which))
    ran = subprocess.run(
        [sys.executable, "-c", _ENGINE, model], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    n_ctx, n_parallel, weights, kv, compute = json.loads(ran.stdout)
    assert main(["show", model, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["result"]["memory"]
    assert (memory["n_ctx"], memory["n_parallel"], memory["estimate"]["weights_bytes"]) == (
        n_ctx,
        n_parallel,
        weights,
    )
    assert memory["estimate"]["kv_bytes"] == pytest.approx(kv, abs=1 << 15)
    assert memory["estimate"]["compute_bytes"] == pytest.approx(compute, rel=0.15)


def header_with(**metadata: object) -> GgufHeader:
    base = {
        "general.architecture": "x",
        "x.block_count": 4,
        "x.embedding_length": 64,
        "x.attention.head_count": 8,
    }
    return GgufHeader(
        path="",
        version=3,
        file_bytes=0,
        alignment=32,
        data_offset=0,
        tensors=(),
        metadata={**base, **metadata},
    )


def elements(header: GgufHeader) -> list[tuple[int, int]]:
    return [(layer.k_elements, layer.v_elements) for layer in layers(header)]


def test_head_counts() -> None:
    assert elements(header_with()) == [(64, 64)] * 4
    assert elements(header_with(**{"x.attention.head_count_kv": 2})) == [(16, 16)] * 4
    assert elements(header_with(**{"x.attention.head_count_kv": (2, 0, 4, 0)})) == [
        (16, 16),
        (0, 0),
        (32, 32),
        (0, 0),
    ]
    lengths = {
        "x.attention.head_count_kv": 1,
        "x.attention.key_length": 24,
        "x.attention.value_length": 8,
    }
    assert elements(header_with(**lengths)) == [(24, 8)] * 4


def test_windows_and_shared_layers() -> None:
    windowed = header_with(
        **{
            "x.attention.sliding_window": 32,
            "x.attention.sliding_window_pattern": (True, False, True, True),
        }
    )
    assert [layer.window for layer in layers(windowed)] == [32, 0, 32, 32]
    assert [layer.window for layer in layers(header_with(**{"x.attention.sliding_window": 32}))] == [
        0
    ] * 4
    gemma = header_with(
        **{
            "general.architecture": "gemma3",
            "gemma3.block_count": 6,
            "gemma3.attention.sliding_window": 512,
        }
    )
    assert [layer.window for layer in layers(gemma)] == [512] * 5 + [0]
    assert len(layers(header_with(**{"x.attention.shared_kv_layers": 3}))) == 1


def test_recurrent_layers_keep_a_state_instead() -> None:
    state = {"x.ssm.inner_size": 128, "x.ssm.state_size": 16, "x.ssm.conv_kernel": 4}
    mixed = header_with(**{"x.attention.head_count_kv": (0, 2, 0, 2), **state})
    one, two = estimate(mixed, 256), estimate(mixed, 512)
    assert two.kv_bytes - one.kv_bytes == 256 * 2 * (16 + 16) * 2
    assert one.kv_bytes - 256 * 2 * 32 * 2 == 2 * 4 * (3 * 128 + 16 * 128)


def test_absurd_headers_do_not_break_it() -> None:
    empty = GgufHeader(
        path="", version=3, file_bytes=0, alignment=32, data_offset=0, tensors=(), metadata={}
    )
    assert estimate(empty).kv_bytes == 0
    assert estimate(header_with(**{"x.attention.head_count": 0})).kv_bytes == 0
    assert estimate(header_with(**{"x.attention.head_count": "eight"})).kv_bytes == 0


def machine(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    return proc, groups


def test_machine_without_limits(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/user\n")
    found = machine_memory(proc, groups)
    assert (found.total_bytes, found.available_bytes) == (16_000_000 * 1024, 12_000_000 * 1024)
    assert "MemAvailable" in found.reason


def test_the_tightest_group_counts_and_cache_is_reclaimable(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/a/b\n")
    (groups / "a/b").mkdir(parents=True)
    (groups / "a/memory.max").write_text("4000000000\n")
    (groups / "a/memory.current").write_text("1500000000\n")
    (groups / "a/memory.stat").write_text("anon 1\ninactive_file 500000000\n")
    (groups / "a/b/memory.max").write_text("max\n")
    found = machine_memory(proc, groups)
    assert (found.total_bytes, found.available_bytes) == (4_000_000_000, 3_000_000_000)
    assert str(groups / "a/memory.max") in found.reason


def test_version_1_groups(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "4:memory:/c\n0::/\n")
    (groups / "memory/c").mkdir(parents=True)
    (groups / "memory/c/memory.limit_in_bytes").write_text("2000000000\n")
    (groups / "memory/c/memory.usage_in_bytes").write_text("500000000\n")
    assert machine_memory(proc, groups).available_bytes == 1_500_000_000


def test_no_linux(tmp_path: Path) -> None:
    assert machine_memory(tmp_path, tmp_path).available_bytes == 0
