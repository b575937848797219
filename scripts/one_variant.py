"""Keep only this machine's CPU variant in llama.cpp's source: `one_variant.py SOURCE`.

Edits ggml/src/CMakeLists.txt below SOURCE. The remaining variant is the one that ggml would choose on
this machine; its options stay, so that this build computes the same as a build of all 14 variants, but
takes two instead of eight minutes on 2 cores. Prints the variant's name. Exits with 1 if no variant is
known to fit (another architecture, or a changed source); then all variants must be compiled.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

CMAKE = "vendor/llama.cpp/ggml/src/CMakeLists.txt"
#: ggml's name of a feature → its flags in /proc/cpuinfo, and its bit in ggml's score (cpu-feats.cpp).
FEATURES: dict[str, tuple[str, int]] = {
    "SSE42": ("sse4_2", 2),
    "AVX": ("avx", 4),
    "F16C": ("f16c", 1),
    "FMA": ("fma", 0),
    "AVX2": ("avx2", 5),
    "BMI2": ("bmi2", 3),
    "AVX_VNNI": ("avx_vnni", 6),
    "AVX512": ("avx512f avx512cd avx512vl avx512dq avx512bw", 7),
    "AVX512_VBMI": ("avx512vbmi", 8),
    "AVX512_BF16": ("avx512_bf16", 9),
    "AVX512_VNNI": ("avx512_vnni", 10),
    "AMX_INT8": ("amx_int8", 11),
    "AMX_TILE": ("amx_tile", 11),
    # arm64. SME is left out: gcc before 14 does not support it, and ggml's own kernels do not use it
    "DOTPROD": ("asimddp", 1),
    "FP16_VECTOR_ARITHMETIC": ("asimdhp", 2),
    "SVE": ("sve", 3),
    "MATMUL_INT8": ("i8mm", 4),
    "SVE2": ("sve2", 5),
}
VARIANT = re.compile(r"^ *ggml_add_cpu_backend_variant\(([\w.]+)([A-Z0-9_ ]*)\) *\n", re.MULTILINE)
#: Machine → pattern of the names of its variants on Linux.
NAMES = {"x86_64": re.compile(r"[a-z]+\d*"), "aarch64": re.compile(r"armv[\d._]+")}


def score(features: str, flags: set[str]) -> int:
    """Return ggml's score of a variant on a CPU with `flags`; -1 if it does not run there."""
    needed = [FEATURES[name] for name in features.split()]
    if not all(flags.issuperset(words.split()) for words, _ in needed):
        return -1
    return sum({1 << bit for _, bit in needed})


def choose(cmake: str, flags: set[str], machine: str) -> str:
    """Return the name of `machine`'s best variant in `cmake`; "" if none fits these CPU `flags`."""
    scores = {}
    for name, features in VARIANT.findall(cmake):
        if NAMES[machine].fullmatch(name) and set(features.split()) <= FEATURES.keys():
            scores.setdefault(name, score(features, flags))
    best = max(scores, key=lambda name: scores[name], default="")
    return best if best and scores[best] >= 0 else ""


def keep_only(cmake: str, chosen: str) -> str:
    """Return `cmake` without the lines of the other variants."""
    return VARIANT.sub(lambda line: line[0] if line[1] == chosen else "", cmake)


def main() -> int:
    """Edit the file below the folder `argv[1]`; exit 1 if no variant is known to fit."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in NAMES:
        return 1
    file = Path(sys.argv[1]) / CMAKE
    cmake = file.read_text("utf-8")
    flags = re.search(
        r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE
    )
    chosen = choose(cmake, set(flags[1].split()) if flags else set(), machine)
    if chosen:
        file.write_text(keep_only(cmake, chosen), "utf-8")
        print(chosen)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
