"""Programs for arm64: compiled with the kernels of a level, and run in qemu-user."""

import os
import shutil
from pathlib import Path

import llama_cpp
import pytest
from other_processes import run

from edgeinfer.runtime.llama import libedgeinfer

from ..conftest import BUILD_CACHE, ROOT

#: Level → a processor that has no more.
PROCESSORS = {"dotprod": "neoverse-n1", "i8mm": "max"}
_CROSS = BUILD_CACHE / "cross-arm64"
_GGML, _NATIVE = _CROSS / f"ggml-{libedgeinfer.BUILT_FOR}", _CROSS / "native"
_INCLUDED = Path(llama_cpp.__file__).parents[1] / "include", ROOT / "native"


def compile_program(source: str, level: str, program: Path) -> None:
    """Compile a program of this folder; both libraries are compiled once, and kept in the build cache."""
    if not shutil.which("qemu-aarch64") or not _GGML.exists():
        pytest.skip("scripts/setup.sh test-all found no qemu-user, or no compiler for arm64")
    compiler = _CROSS / "bin/aarch64-linux-gnu-g++"
    run(ROOT / "scripts/build_arm64_ggml.sh", _CROSS)
    environment = {**os.environ, "CXX": str(compiler)}
    # took more than 300 s next to other tests
    run(ROOT / "native/build.sh", "aarch64", _NATIVE, timeout=850, env=environment)
    run(
        *(compiler, Path(__file__).with_name(source), *(f"-I{folder}" for folder in _INCLUDED)),
        *("-O2", "-pthread", "-ffp-contract=off"),  # the same random numbers as on x86-64
        *(_NATIVE / f"libedgeinfer-{name}.so.1" for name in (f"kernels-{level}", "cells")),
        *(_GGML / f"libggml-{name}.so.0" for name in ("cpu", "base")),
        "-Wl,--allow-shlib-undefined",  # libggml-base is not whole
        *("-o", program),
    )


def run_program(program: Path, level: str, *arguments: str | Path) -> list[str]:
    """Return the lines that a program prints on the processor of a level."""
    processor = ("-cpu", PROCESSORS[level], "-L", _CROSS / "usr/aarch64-linux-gnu")
    libraries = {**os.environ, "LD_LIBRARY_PATH": f"{_GGML}:{_NATIVE}"}
    return run("qemu-aarch64", *processor, program, *arguments, env=libraries).stdout.splitlines()
