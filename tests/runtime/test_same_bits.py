"""Bit-identical on every processor: whole graphs of each family, with the CPU variants and kernels of each level."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from made_families import FAMILIES, make_family
from made_projectors import copy_model

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.llama import libedgeinfer, libllama
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.scheduler.batch_invariance import why_irreproducible

from ..conftest import ROOT
from . import arm64
from .conftest import answer, load
from .test_attention import LEVELS, can_run, level_here, run

PROGRAM = ROOT / "tests/made/graph_digests.py"
#: Level → one of ggml's CPU variants for it, which every processor of that level can run.
_VARIANTS = {"v3": "haswell", "v3-vnni": "alderlake", "v4": "cascadelake"}
#: Family → digest of its logits after 44 tokens, on any processor. After a change of bits, write down what the failure
#: shows, and raise the kernels' revision.
_DIGESTS = {
    "Llama": "27d8583ae144",
    "Mixtral (a mixture of experts)": "1a9b0bcadd78",
    "Qwen2": "bbe97a8c6597",
    "Qwen3": "f8cb887fb74c",
    "Qwen2-VL (M-RoPE)": "58e708654f47",
    "Falcon": "ee03960c87e4",
    "MPT": "e02038114715",
    "BLOOM": "318ac450b917",
    "GPT-2": "239ea86b9218",
    "StarCoder": "bee322b55c3a",
    "StarCoder2": "eb6850b95961",
    "GPT-NeoX": "e160aa565b12",
    "Phi-2": "0e85976c678c",
    "Mamba": "7cfe895f7450",
    "Jamba (a hybrid)": "e18e222cb12f",
    "RWKV-6": "288fee2c9855",
}

Graphs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of every family."""
    folder = tmp_path_factory.mktemp("families")
    return {name: make_family(folder / f"{i}.gguf", name) for i, name in enumerate(FAMILIES)}


def _variant(level: str) -> str:
    """Return a variant for a level: after `make run`, the only one there is."""
    folders = libllama.variant_dirs()
    built = [path.stem for folder in folders for path in folder.glob("libggml-cpu-*.so")]
    variants = [name.removeprefix("libggml-cpu-") for name in built]
    return _VARIANTS[level] if _VARIANTS[level] in variants else variants[0]


@pytest.fixture(scope="module")
def recorded(
    models: dict[str, Path], smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Path]]:
    """Every operation of the families' graphs and of a real model's, as AVX2 computes it."""
    if not can_run("v3"):
        pytest.skip("this processor has not the instructions of v3")
    folder = tmp_path_factory.mktemp("recorded")
    made = [folder / "families", folder / "smollm2"]
    for path, options in zip(made, (models.values(), (smollm2, "--steps", "8,1")), strict=True):
        run(PROGRAM, _variant("v3"), "v3", *options, "--record", path)
    yield made
    shutil.rmtree(folder)  # half a gigabyte


def _graphs(level: str, models: dict[str, Path], kernels: str | None = None) -> Graphs:
    results = json.loads(run(PROGRAM, _variant(level), kernels or level, *models.values()))
    return {name: results[str(path)] for name, path in models.items()}


def _level_here() -> str:
    return level_here() or pytest.skip("this processor has no kernels of ours")


@pytest.fixture(scope="module")
def graphs(models: dict[str, Path]) -> Graphs:
    return _graphs(_level_here(), models)


@pytest.mark.needs("levels")
@pytest.mark.parametrize("level", LEVELS)
def test_no_tensor_of_a_family_depends_on_the_level(
    level: str, models: dict[str, Path], graphs: Graphs
) -> None:
    if not can_run(level):
        pytest.skip(f"this processor has not the instructions of {level}")
    for family, others in _graphs(level, models).items():
        for computed, other in zip(graphs[family], others, strict=True):
            pairs = zip(computed["tensors"], other["tensors"], strict=True)
            differing = [tensor for tensor, same in pairs if tensor != same]
            assert not differing, f"{family}: {len(differing)} differ, the first is {differing[0]}"


@pytest.mark.needs("arm64")
@pytest.mark.timeout(900)  # emulated
@pytest.mark.model
@pytest.mark.xdist_group("fuzzed kernels")  # which compile the same libraries
@pytest.mark.parametrize("level", arm64.PROCESSORS)
def test_no_operation_of_a_graph_differs_on_arm64(
    level: str, recorded: list[Path], tmp_path: Path
) -> None:
    arm64.compile_program("replay_graph.cpp", level, tmp_path / level)
    for path in recorded:
        *differing, n_compared = arm64.run_program(tmp_path / level, level, path)
        assert not differing, differing[:4]
        assert int(n_compared) > 1000


def test_no_family_has_an_operation_that_depends_on_the_processor(graphs: Graphs) -> None:
    assert {computed["dependent"] for both in graphs.values() for computed in both} == {""}


def test_logits_are_those_of_other_processors(graphs: Graphs) -> None:
    logits = {family: [graph["logits"] for graph in both] for family, both in graphs.items()}
    digests = {name: hashlib.sha256(repr(of).encode()).hexdigest()[:12] for name, of in logits.items()}
    assert digests == _DIGESTS


def test_logits_are_close_to_llama_cpps(models: dict[str, Path], graphs: Graphs) -> None:
    for family, others in _graphs(_level_here(), models, "none").items():
        for computed, other in zip(graphs[family], others, strict=True):
            expected = np.array(other["logits"])
            assert np.abs(computed["logits"] - expected).max() < 0.02 * expected.std(), family


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with BF16 weights: AVX-512 has an instruction that rounds the activations too."""
    folder = tmp_path_factory.mktemp("bf16")

    def convert(tensor: Any) -> tuple[Any, Any]:
        if not tensor.name.endswith("ffn_up.weight"):
            return tensor.data, tensor.tensor_type
        kind = gguf.GGMLQuantizationType.BF16
        return gguf.quants.quantize(tensor.data, kind), kind

    plain = make_family(folder / "f32.gguf", "Llama")
    return copy_model(folder / "bf16.gguf", plain, change=convert)


def test_an_operation_that_depends_on_the_processor_is_named(bf16: Path) -> None:
    (computed, _) = _graphs(_level_here(), {"bf16": bf16})["bf16"]
    assert computed["dependent"] == "MUL_MAT bf16"


def test_an_operation_that_depends_on_the_processor_denies_a_receipt(
    smol: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libedgeinfer, "dependent_operation", lambda: "")
    assert why_irreproducible(smol._loaded) == ""
    monkeypatch.setattr(libedgeinfer, "dependent_operation", lambda: "MUL_MAT bf16")
    assert "MUL_MAT bf16" in why_irreproducible(smol._loaded)


def test_another_engine_of_the_process_denies_no_receipt(bf16: Path, smollm2: Path) -> None:
    request = GenerateRequest(prompt="Two ships", max_tokens=2, record_tokens=True)
    with closing(load(bf16)) as other, closing(load(smollm2)) as smol:
        records = [answer(engine, request).finish.record for engine in (other, smol)]
    assert [record.irreproducible.partition(" (")[2] for record in records] == ["MUL_MAT bf16)", ""]
