"""The in-tree C++ libraries (native/): their folder, and the kernels for ggml's CPU backend.

ggml offers each operation to its "extra buffer types" before computing it; its repacked weights use
this. Our kernels (attention, matrix products) are another such type, which holds no weights
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
#: The llama-cpp-python version that the kernels are built for: they access its data by offsets.
BUILT_FOR = "0.3.36"
#: Mangled name of ggml_backend_cpu_get_extra_buffer_types, a function of the CPU variant's library.
_EXTRA_TYPES = "_Z39ggml_backend_cpu_get_extra_buffer_typesv"
#: Functions of each library, without `edgeinfer_`, by the first word of the library's name.
_FUNCTIONS = {
    "kernels": "kernels version dependent_operation cells_written cells_freed "
    "adapter_open adapter_close adapters_begin adapters_end "
    "stream_start stream_end stream_aim stream_statistics stream_stop",
    "guard": "guard decode reason call call_with",
    "cells": "cells cells_get cells_set",
}
#: ggml_backend_dev_type.
_CPU = 0
#: ggml's CPU variant of x86-64 → level of the kernels for it: x86-64-v3, with AVX-VNNI, or v4 with
#: VNNI.
LEVELS = {
    "haswell": "v3",
    "skylakex": "v3",
    "cannonlake": "v3",
    "alderlake": "v3-vnni",
} | dict.fromkeys("cascadelake cooperlake icelake zen4 sapphirerapids".split(), "v4")
#: getauxval's AT_HWCAP and AT_HWCAP2, and one bit of each on arm64.
_HWCAPS = (16, 26)
_ASIMDDP, _I8MM = 1 << 20, 1 << 13


class Kernels(msgspec.Struct, frozen=True):
    """The kernels in use. `level` is the result of `level_of`, "" for llama.cpp's own kernels.

    `version` is a digest of the library's sources, "" for llama.cpp's own.
    """

    level: str = ""
    version: str = ""


def folder() -> Path:
    """Return the libraries' folder: in the shipped file, or the output folder of native/build.sh."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "native" if frozen else Path(sys.prefix) / "lib/edgeinfer/native"


def library(name: str) -> Path:
    """Return the path of a library by name, such as "guard" or "kernels-v3"."""
    return folder() / f"libedgeinfer-{name}.so.1"


def open_library(name: str, binding_version: str) -> ctypes.CDLL:
    """Open the library of that name.

    Raises OSError if it is missing, built for another llama.cpp, or older than this program.
    """
    path = library(name)
    if not _fits(binding_version):
        raise OSError(f"{path} is built for llama-cpp-python {BUILT_FOR}")
    opened = ctypes.CDLL(str(path))
    functions = _FUNCTIONS.get(name.partition("-")[0], "").split()
    missing = [function for function in functions if not hasattr(opened, f"edgeinfer_{function}")]
    if missing:
        _say_old(path, missing[0])
        raise OSError(f"{path} is older than this program")
    return opened


@cache
def _say_old(path: Path, missing: str) -> None:
    _log.warning(
        "%s is older than this program (it lacks edgeinfer_%s): it is not used, which is slower; "
        "run native/build.sh",
        *(path, missing),
    )


@cache
def _fits(binding_version: str) -> bool:
    fits = binding_version == BUILT_FOR
    if not fits:
        _log.warning(
            "llama-cpp-python is %s, and edgeinfer's native code is for %s: it is not used, which "
            "is slower; run pip install llama-cpp-python==%s",
            *(binding_version, BUILT_FOR, BUILT_FOR),
        )
    return fits


def cpu_library() -> str:
    """Find the mapped library of ggml's CPU variant; return "" without variants."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    match = re.search(r"/.*libggml-cpu-[\w.]+\.so$", maps, re.MULTILINE)
    return match.group() if match else ""


def variant_of(path: str) -> str:
    """Return the CPU variant in a library's name: `…/libggml-cpu-zen4.so` → `zen4`; "" for ""."""
    return Path(path).stem.removeprefix("libggml-cpu-")


def level_of(variant: str) -> str:
    """Return the kernel level for ggml's CPU variant on this machine; "" if there is none.

    On arm64 the processor decides: ggml's variants with i8mm need SVE too.
    """
    if not variant.startswith("armv"):
        return LEVELS.get(variant, "")
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return arm_level(*(getauxval(kind) for kind in _HWCAPS))


def arm_level(hwcap: int, hwcap2: int) -> str:
    """Return the level for an arm64 processor with these hardware capabilities of Linux."""
    if not hwcap & _ASIMDDP:
        return ""
    return "i8mm" if hwcap2 & _I8MM else "dotprod"


def dependent_operation() -> str:
    """Return an operation that this process has computed and whose bits depend on the processor.

    It is ggml's name of the operation and the type of its first operand ("MUL_MAT bf16"). "" means
    none: answers are bit-identical with AVX2 and AVX-512. Without in-tree kernels it is "every one".
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
    """Register the kernel library with the loaded CPU backend. Call it once.

    llama.cpp's own kernels stay in use if the library is missing, cannot be opened, or does not fit
    this variant. `ggml` and `base` are libggml and libggml-base, with their functions declared.
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
    """List the device's extra buffer types now: ggml keeps the first list, and uses it for weights."""
    device = ggml.ggml_backend_dev_by_type(_CPU)
    registry = base.ggml_backend_dev_backend_reg(device)
    address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(device)
