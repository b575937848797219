"""The libraries of our own C++ (native/), fuzzed: with sanitizers, and as they are shipped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import llama_cpp
import pytest

from edgeinfer.runtime.llama import libedgeinfer

from ..conftest import ROOT
from .test_attention import LEVELS, can_run

_SITE = Path(llama_cpp.__file__).parents[1]
_GGML = _SITE / "llama_cpp/lib"
_NAMES = "kernels attention cell_order matmul adapters cells version".split()
_SOURCES = [ROOT / f"native/{name}.cpp" for name in _NAMES]
_SANITIZED = "-O0 -g1 -DINLINE=inline -fsanitize=address,undefined -fno-sanitize-recover=all"
#: Operations of tests/engine/fuzz_kernels.cpp: with sanitizers some ten a second.
_SANITIZED_CASES, _CASES = 200, 600

pytestmark = pytest.mark.xdist_group("fuzzed kernels")


def _compile(program: Path, *options: str | Path) -> None:
    headers = (f"-I{_SITE / 'include'}", f"-I{ROOT / 'native'}")
    ggml = (f"-L{_GGML}", "-l:libggml-base.so.0", "-pthread")
    source = ROOT / "tests/engine/fuzz_kernels.cpp"
    subprocess.run(["g++", *headers, source, *options, *ggml, "-o", program], check=True)


def _fuzz(program: Path, cases: int) -> list[str]:
    done = subprocess.run(
        [program, str(cases)],
        env={**os.environ, "LD_LIBRARY_PATH": f"{_GGML}:{libedgeinfer.folder()}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == cases
    return lines


def _shipped(level: str, folder: Path) -> list[str]:
    _compile(
        folder / level, "-O2", libedgeinfer.library(f"kernels-{level}"), libedgeinfer.library("cells")
    )
    return _fuzz(folder / level, _CASES)


@pytest.mark.parametrize("level", LEVELS)
def test_native_code_passes_the_sanitizers(level: str, tmp_path: Path) -> None:
    if not can_run(level):
        pytest.skip(f"this processor has not the instructions of {level}")
    _compile(
        tmp_path / level,
        *_SOURCES,
        '-DEDGEINFER_VERSION=""',
        *_SANITIZED.split(),
        *LEVELS[level].split(),
    )
    _fuzz(tmp_path / level, _SANITIZED_CASES)


def test_levels_agree_bit_for_bit(tmp_path: Path) -> None:
    first, *others = (_shipped(level, tmp_path) for level in LEVELS if can_run(level))
    apart = ("declined", " bf16 ")  # AVX-512 has an instruction of its own for BF16
    for other in others:
        both = [p for p in zip(first, other, strict=True) if not any(word in p[1] for word in apart)]
        assert [one for one, _ in both] == [two for _, two in both]
