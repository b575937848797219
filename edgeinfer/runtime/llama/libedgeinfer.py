"""Find and open edgeinfer's C++ libraries (native/), and register the kernels with ggml's CPU backend.

Before ggml computes an operation itself, it asks each "extra buffer type" whether that type computes
the operation. The kernels (attention, matrix products) are registered as such types
(docs/decisions/095-attention-kernels.md, 098-matrix-kernels.md).
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from functools import cache
from pathlib import Path

import msgspec

_log = logging.getLogger("edgeinfer.engine")
#: The only version of llama-cpp-python that the libraries work with: they use its private structs.
BUILT_FOR = "0.3.36"
#: Mangled name of ggml_backend_cpu_get_extra_buffer_types; edgeinfer's kernels are added to the list
#: that this C++ function returns.
_EXTRA_TYPES = "_Z39ggml_backend_cpu_get_extra_buffer_typesv"
#: Functions that a library must export, without the prefix `edgeinfer_`, to detect an old library.
_FUNCTIONS = {
    "kernels": "kernels version dependent_operation cells_written cells_freed "
    "adapter_open adapter_close adapters_begin adapters_end "
    "stream_start stream_end stream_follow stream_statistics stream_stop",
    "guard": "guard reason guarded_call",
    "cells": "cells cells_get cells_set",
}
#: Value of the C constant GGML_BACKEND_DEVICE_TYPE_CPU.
_CPU = 0
#: CPU variant of ggml on x86-64 → level of the kernels: AVX2 ("v3"), AVX2 with VNNI, AVX-512 with VNNI
#: ("v4").
LEVELS = {
    "haswell": "v3",
    "skylakex": "v3",
    "cannonlake": "v3",
    "alderlake": "v3-vnni",
} | dict.fromkeys("cascadelake cooperlake icelake zen4 sapphirerapids".split(), "v4")
#: Arguments of getauxval(3), AT_HWCAP and AT_HWCAP2, and the bits in its results that stand for arm64's
#: dot products and i8mm.
_HWCAPS = (16, 26)
_ASIMDDP, _I8MM = 1 << 20, 1 << 13


class Kernels(msgspec.Struct, frozen=True):
    """Which of edgeinfer's kernels are in use.

    `level` is the instruction set ("v3", "v4", "i8mm" …), `version` a digest of the sources; both are
    "" if llama.cpp's own kernels are used.
    """

    level: str = ""
    version: str = ""


def folder() -> Path:
    """Return the libraries' folder: in the one-file program, or where native/build.sh writes."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "native" if frozen else Path(sys.prefix) / "lib/edgeinfer/native"


def library(name: str) -> Path:
    """Return the path of the library "guard", "cells", "kernels-v3" and so on."""
    return folder() / f"libedgeinfer-{name}.so.1"


def open_library(name: str, binding_version: str) -> ctypes.CDLL:
    """Open the library `name` for llama-cpp-python `binding_version`.

    Raises OSError if the library is missing, built for another llama.cpp, or older than this program.
    """
    path, unused = library(name), "it is not used, which is slower"
    if binding_version != BUILT_FOR:
        problem = (
            f"llama-cpp-python is {binding_version}, and edgeinfer's native code is for {BUILT_FOR}"
        )
        _warn(f"{problem}: {unused}; run pip install llama-cpp-python=={BUILT_FOR}")
        raise OSError(f"{path} is built for llama-cpp-python {BUILT_FOR}, not for {binding_version}")
    opened = ctypes.CDLL(str(path))
    functions = _FUNCTIONS.get(name.partition("-")[0], "").split()
    missing = [function for function in functions if not hasattr(opened, f"edgeinfer_{function}")]
    if missing:
        problem = f"{path} is older than this program"
        _warn(f"{problem} (it lacks edgeinfer_{missing[0]}): {unused}; run native/build.sh")
        raise OSError(problem)
    return opened


@cache
def _warn(text: str) -> None:
    _log.warning("%s", text)


def cpu_library() -> str:
    """Return the path of the loaded library of ggml's CPU variant, "" if there are no variants."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    match = re.search(r"/.*libggml-cpu-[\w.]+\.so$", maps, re.MULTILINE)
    return match.group() if match else ""


def variant_of(path: str) -> str:
    """Return the CPU variant of a library: "zen4" for `…/libggml-cpu-zen4.so`, "" for ""."""
    return Path(path).stem.removeprefix("libggml-cpu-")


def level_of(variant: str) -> str:
    """Return which build of the kernels fits a CPU variant of ggml on this machine, "" if none does.

    On arm64 the CPU decides, not the variant: ggml has no variant for CPUs with i8mm but without SVE.
    """
    if not variant.startswith("armv"):
        return LEVELS.get(variant, "")
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return arm_level(*(getauxval(kind) for kind in _HWCAPS))


def arm_level(hwcap: int, hwcap2: int) -> str:
    """Return the kernel level of an arm64 processor by its AT_HWCAP and AT_HWCAP2; "" if too old."""
    if not hwcap & _ASIMDDP:
        return ""
    return "i8mm" if hwcap2 & _I8MM else "dotprod"


def dependent_operation() -> str:
    """Return the first computed operation whose bits depend on the processor, "" if there was none.

    Each thread records the operations that it computes, so call this on the decode thread. The result
    is ggml's name of the operation and the type of its first operand ("MUL_MAT bf16"), or "every one"
    without edgeinfer's kernels. If it is "", answers are bit-identical with AVX2 and AVX-512.
    """
    level = level_of(variant_of(cpu_library()))
    if not level:
        return "every one"
    try:
        kernels = ctypes.CDLL(str(library(f"kernels-{level}")))
        function = kernels.edgeinfer_dependent_operation
    except (OSError, AttributeError):
        return "every one"
    function.restype, function.argtypes = ctypes.c_char_p, []
    name: bytes = function()
    return name.decode()


def use_kernels(ggml: ctypes.CDLL, base: ctypes.CDLL, binding_version: str) -> Kernels:
    """Register the kernels for this CPU with ggml's loaded CPU backend; return them. Call this once.

    If no library for this CPU exists or can be opened, llama.cpp's own kernels stay in use, and the
    returned `Kernels` is empty. `ggml` and `base` are libggml and libggml-base.
    """
    path = cpu_library()
    level = level_of(variant_of(path))
    if not level:
        return Kernels()
    try:
        kernels = open_library(f"kernels-{level}", binding_version)
        cpu = ctypes.CDLL(path)
        functions = (getattr(cpu, name) for name in (_EXTRA_TYPES, "ggml_barrier"))
        types, barrier = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
        hook, version = kernels.edgeinfer_kernels, kernels.edgeinfer_version
    except (OSError, AttributeError):
        return Kernels()
    version.restype = ctypes.c_char_p
    hook.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    hook.restype = None
    _list_buffer_types(ggml, base)
    hook(types, barrier)
    return Kernels(level, version().decode())


def _list_buffer_types(ggml: ctypes.CDLL, base: ctypes.CDLL) -> None:
    """Have ggml cache its list of buffer types for weights, before the kernels' types are added."""
    device = ggml.ggml_backend_dev_by_type(_CPU)
    registry = base.ggml_backend_dev_backend_reg(device)
    address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(device)
