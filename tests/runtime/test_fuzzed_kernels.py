"""The libraries of our own C++ (native/), fuzzed: with sanitizers, as they are shipped, and those for arm64."""

import os
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest
from other_processes import run

from edgeinfer.runtime.llama import libedgeinfer

from ..conftest import ROOT
from . import arm64
from .test_attention import LEVELS, can_run, level_here

_SITE = Path(llama_cpp.__file__).parents[1]
_GGML = _SITE / "llama_cpp/lib"
_NAMES = "kernels attention cell_order matmul adapters elementwise streaming cells version".split()
_SOURCES = [ROOT / f"native/{name}.cpp" for name in _NAMES]
_SANITIZED = "-O0 -g1 -DINLINE=inline -fsanitize=address,undefined -fno-sanitize-recover=all"
#: Operations of tests/runtime/fuzz_kernels.cpp: with sanitizers some ten a second.
_SANITIZED_CASES, _CASES = 200, 600
#: qemu computes ten cases a second.
_ARM64_CASES = 48

pytestmark = pytest.mark.xdist_group("fuzzed kernels")


def _compile(program: Path, *options: str | Path) -> None:
    headers = (f"-I{_SITE / 'include'}", f"-I{ROOT / 'native'}")
    libraries = (f"-L{_GGML}", "-l:libggml-base.so.0", "-pthread")
    source = ROOT / "tests/runtime/fuzz_kernels.cpp"
    run("g++", *headers, source, *options, *libraries, "-o", program)


def _fuzz(*command: str | Path) -> list[str]:
    libraries = {**os.environ, "LD_LIBRARY_PATH": f"{_GGML}:{libedgeinfer.folder()}"}
    return run(*command, env=libraries).stdout.splitlines()


def _fuzz_shipped(level: str, folder: Path, cases: int = _CASES) -> list[str]:
    libraries = (libedgeinfer.library(name) for name in (f"kernels-{level}", "cells"))
    _compile(folder / level, "-O2", *libraries)
    return _fuzz(folder / level, str(cases), "grid")


@pytest.mark.needs("sanitizers")
@pytest.mark.parametrize("level", LEVELS)
def test_native_code_passes_the_sanitizers(level: str, tmp_path: Path) -> None:
    if not can_run(level):
        pytest.skip(f"this processor has not the instructions of {level}")
    flags = ['-DEDGEINFER_VERSION=""', *_SANITIZED.split(), *LEVELS[level].split()]
    _compile(tmp_path / level, *_SOURCES, *flags)
    lines = _fuzz(tmp_path / level, str(_SANITIZED_CASES))
    assert len(lines) == _SANITIZED_CASES


def _agree(first: list[str], second: list[str], *apart: str) -> None:
    """Fail if outcomes differ that neither level declines and that have none of these words."""
    pairs = list(zip(first, second, strict=True))
    reasons = ("declined", *apart)
    both = [pair for pair in pairs if not any(word in line for line in pair for word in reasons)]
    assert len(both) > len(pairs) * 0.8
    assert [a for a, _ in both] == [b for _, b in both]


def test_kernels_of_this_processor_are_exact(tmp_path: Path, repeats: Callable[[int], int]) -> None:
    if not (level := level_here()):
        pytest.skip("this processor has no kernels of ours")
    assert len(_fuzz_shipped(level, tmp_path, repeats(_CASES))) > repeats(_CASES)


@pytest.mark.needs("levels")
def test_levels_agree_bit_for_bit(tmp_path: Path) -> None:
    first, *other_digests = (_fuzz_shipped(level, tmp_path) for level in LEVELS if can_run(level))
    for other in other_digests:
        _agree(first, other, " bf16 ")  # AVX-512 has an instruction of its own for BF16


@pytest.mark.needs("arm64")
@pytest.mark.timeout(900)  # emulated: a minute on two idle cores, more than five on busy ones
@pytest.mark.parametrize("level", arm64.PROCESSORS)
def test_arm64_agrees_with_avx2_bit_for_bit(level: str, tmp_path: Path) -> None:
    if not can_run("v3"):
        pytest.skip("this processor has not the instructions of v3")
    arm64.compile_program("fuzz_kernels.cpp", level, tmp_path / level)
    digests = arm64.run_program(tmp_path / level, level, str(_ARM64_CASES), "grid")
    _agree(_fuzz_shipped("v3", tmp_path, _ARM64_CASES), digests)
