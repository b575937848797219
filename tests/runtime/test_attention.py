"""Which kernels of our own (native/) are used, and llama.cpp with its attention and with ours."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.llama import libedgeinfer, libllama
from edgeinfer.runtime.prefix_cache import cache

from ..conftest import ROOT

#: Decodes 300 tokens and then 8, and saves the logits of the 8; prints which attention that was.
STEP = """
import sys
from pathlib import Path
import numpy as np
from edgeinfer.runtime.llama import libedgeinfer, libllama
model, out, folder = sys.argv[1:]
if folder:
    libedgeinfer.folder = lambda: Path(folder)
L = libllama.lib()
loaded = L.llama_model_load_from_file(model.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 512, 2, 2
context = L.llama_init_from_model(loaded, params)
n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(loaded))
for first, n in ((0, 300), (300, 8)):
    batch = L.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i] = 1000 + (first + i) * 37 % 5000, first + i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, first > 0
    assert L.llama_decode(context, batch) == 0
np.save(out, np.stack([np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (n_vocab,)) for i in range(8)]))
print(libllama.build_info().kernels)
"""


#: Level of native/build.sh → the options that it is compiled with.
LEVELS = {
    "v3": "-march=x86-64-v3",
    "v3-vnni": "-march=x86-64-v3 -mavxvnni",
    "v4": "-march=x86-64-v4 -mavx512vnni",
}
_FLAGS = {
    "v3": {"avx2", "fma", "f16c"},
    "v3-vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "v4": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
}


def can_run(level: str) -> bool:
    """Tell if this processor has the instructions of one of LEVELS."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return False
    return _FLAGS[level] <= set(flags)


def run_python(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300)


def run(*args: str | Path) -> str:
    done = run_python(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def level_here() -> str:
    """The level that `native/build.sh here` builds; "" for none."""
    return next((level for level in reversed(LEVELS) if can_run(level)), "")


def test_logits_are_close_to_those_of_llama_cpp(smollm2: Path, tmp_path: Path) -> None:
    level = run("-c", STEP, smollm2, tmp_path / "ours.npy", "").strip()
    if not level:
        pytest.skip("this processor's variant has no attention of ours")
    assert run("-c", STEP, smollm2, tmp_path / "theirs.npy", tmp_path) == "\n"
    kernel_logits, llama_logits = (np.load(tmp_path / f"{name}.npy") for name in ("ours", "theirs"))
    assert 0 < np.abs(kernel_logits - llama_logits).max() < 0.5 * llama_logits.std()
    assert np.corrcoef(kernel_logits.ravel(), llama_logits.ravel())[0, 1] > 0.99


def test_kernel_level_fits_the_cpu_variant() -> None:
    build = libllama.build_info()
    assert build.kernels == libedgeinfer.level_of(build.cpu_variant)
    assert bool(build.kernels_version) == bool(build.kernels)
    assert libedgeinfer.variant_of("/a place/libggml-cpu-haswell.so") == "haswell"
    assert libedgeinfer.LEVELS["haswell"] == "v3"
    assert libedgeinfer.LEVELS["skylakex"] == "v3"
    assert "sandybridge" not in libedgeinfer.LEVELS


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "level"),
    [(0xFF, 0, ""), (1 << 20, 1 << 12, "dotprod"), (1 << 20, 1 << 13, "i8mm"), (0, 1 << 13, "")],
)
def test_kernel_level_fits_an_arm64_processor(hwcap: int, hwcap2: int, level: str) -> None:
    assert libedgeinfer.arm_level(hwcap, hwcap2) == level


@pytest.mark.parametrize("content", [None, b"no library"])
def test_llama_cpp_kernels_serve_without_the_library(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        for level in libedgeinfer.LEVELS.values():
            (tmp_path / f"libedgeinfer-kernels-{level}.so.1").write_bytes(content)
    program = (
        "import sys\nfrom pathlib import Path\nfrom edgeinfer.cli.main import main\n"
        "from edgeinfer.runtime.llama import libedgeinfer\n"
        "libedgeinfer.folder = lambda: Path(sys.argv[1])\n"
        "sys.exit(main(['doctor']))"
    )
    assert ", llama.cpp's kernels: " in run_python("-c", program, tmp_path).stdout


def test_native_code_for_another_llama_cpp_is_refused_in_one_line() -> None:
    pin = f"llama-cpp-python=={libedgeinfer.BUILT_FOR}"
    assert pin in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    program = (
        "from edgeinfer.runtime.llama import libllama\nlibllama.binding_version = lambda: '9.9.9'\n"
        "from edgeinfer.runtime.llama import cells as cell_copies\n"
        "libllama.guard_calls()\n"
        "print(repr(libllama.build_info().kernels), cell_copies.find_copies(), cell_copies._find(), 'decode' in libllama._state)"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == ["''", "None", "None", "False"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("llama-cpp-python is 9.9.9, and edgeinfer's native code is for ")
    assert line.endswith(f"run pip install {pin}")


def test_native_code_older_than_the_program_is_left_unused(tmp_path: Path) -> None:
    """Of each library another one takes the place, which has none of its functions."""
    guard, cells = (libedgeinfer.library(name).read_bytes() for name in ("guard", "cells"))
    for name in ("guard", *(f"kernels-{level}" for level in libedgeinfer.LEVELS.values())):
        (tmp_path / f"libedgeinfer-{name}.so.1").write_bytes(cells)
    (tmp_path / "libedgeinfer-cells.so.1").write_bytes(guard)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from edgeinfer.runtime.llama import cells, libedgeinfer, libllama\n"
        "libedgeinfer.folder = lambda: Path(sys.argv[1])\nlibllama.guard_calls()\n"
        "print(repr(libllama.build_info().kernels), cells.find_copies(), 'decode' in libllama._state)"
    )
    done = run_python("-c", program, tmp_path)
    assert done.stdout.split() == ["''", "None", "False"]
    assert len(done.stderr.splitlines()) == 3
    assert all("is older than this program (it lacks " in line for line in done.stderr.splitlines())


def test_block_identity_depends_on_the_kernels(
    smol: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = libllama.build_info()
    identities = set()
    for level, version in (("", ""), ("v3", "a"), ("v4", "a"), ("v4", "b")):
        other = replace(build, kernels=level, kernels_version=version)
        monkeypatch.setattr(libllama, "build_info", lambda other=other: other)
        identities.add(tuple(cache.identity(smol._loaded, 256).items()))
    assert len(identities) == 4
