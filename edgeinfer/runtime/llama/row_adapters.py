"""LoRA adapters computed by edgeinfer's kernels, for single rows of a batch (native/adapters.cpp).

llama.cpp applies adapters to whole batches. Here, sequences with different adapters share a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.libllama import L

#: Return code of `Batch.decode` if the kernels could not apply all adapters: the logits are invalid.
MISSED_ADAPTER = 3
#: Mangled name of llama_model::get_tensor.
_GET_TENSOR = "_ZNK11llama_model10get_tensorEPKc"


class _Rows(ctypes.Structure):
    """The struct `Rows` of native/adapters.cpp."""

    _fields_ = (
        ("first", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("first_output", ctypes.c_int32),
        ("n_outputs", ctypes.c_int32),
        ("adapter", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


@cache
def _kernels() -> ctypes.CDLL | None:
    level = libllama.build_info().kernels
    if not level:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "edgeinfer_adapter_open": (pointer, [pointer, pointer]),
        "edgeinfer_adapter_close": (None, [pointer]),
        "edgeinfer_adapters_begin": (pointer, [pointer, integer, integer, integer]),
        "edgeinfer_adapters_end": (ctypes.c_bool, [pointer]),
    }
    return libllama.declare_functions(libllama.own_library(f"kernels-{level}"), signatures)


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter that was loaded for one model.

    `pointer` is llama.cpp's object. `kernels` is the handle of edgeinfer's kernels, 0 if llama.cpp
    computes the adapter. `sha256` is the digest of the file.
    """

    pointer: Any
    sha256: str
    kernels: int = 0

    @property
    def is_per_row(self) -> bool:
        """Return whether rows with and without this adapter may share a step."""
        return bool(self.kernels)

    def use_kernels(self) -> None:
        """Let edgeinfer's kernels compute the adapter, unless they do not support its tensors."""
        if (kernels := _kernels()) and hasattr(L._lib, _GET_TENSOR):
            get_tensor = ctypes.cast(getattr(L._lib, _GET_TENSOR), ctypes.c_void_p)
            self.kernels = kernels.edgeinfer_adapter_open(self.pointer, get_tensor) or 0

    def use_llama_cpp(self) -> None:
        """Let llama.cpp compute the adapter from now on."""
        if (kernels := _kernels()) and self.kernels:
            kernels.edgeinfer_adapter_close(self.kernels)
            self.kernels = 0

    def free(self) -> None:
        """Free the adapter. Call it before its model is freed."""
        self.use_llama_cpp()
        L.llama_adapter_lora_free(self.pointer)


#: Adapters and the rows of a batch that use them: index of the first token, number of tokens, index of
#: the first output, number of outputs.
AdapterRows = tuple[AdapterKey, tuple[int, int, int, int]]


def begin_step(
    batch: Sequence[AdapterRows], loaded: Mapping[str, LoadedAdapter], n_tokens: int, n_outputs: int
) -> int:
    """Let the kernels apply adapters in this thread's next llama_decode.

    `batch` has the adapters of each range of rows, `loaded` the loaded adapters by stamp (see
    `AdapterKey`). `n_tokens` and `n_outputs` count the whole batch. Returns a handle for `end_step`, or
    0 if llama.cpp applies all adapters.
    """
    rows = [  # sorted by adapter: the kernels read the weights of each adapter once
        _Rows(*span, loaded[stamp].kernels, scale)
        for stamp, span, scale in sorted(
            (stamp, span, scale) for adapters, span in batch for stamp, scale in adapters
        )
        if loaded[stamp].is_per_row
    ]
    kernels = _kernels() if rows else None
    if kernels is None:
        return 0
    return int(
        kernels.edgeinfer_adapters_begin((_Rows * len(rows))(*rows), len(rows), n_tokens, n_outputs)
    )


def end_step(step: int) -> bool:
    """End a step (a handle) after llama_decode; return whether the kernels applied all adapters."""
    kernels = _kernels()
    return kernels is None or bool(kernels.edgeinfer_adapters_end(step))
