"""Tells llama.cpp on which devices a model's layers are to lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgeinfer.runtime import libllama
from edgeinfer.runtime.planning.offload import Offload

#: llama.cpp's names of the tensors that are a layer's experts.
_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class Placement:
    """The parameters of a model for `offload`, whose parts lie on `pointers` (ggml_backend_dev_t).

    Without pointers it is all the CPU's: an empty list of devices, because llama.cpp creates each that
    it knows even for no layers. It keeps pointers to what is here while it loads.
    """

    def __init__(self, pointers: Sequence[int], offload: Offload | None = None) -> None:
        self._devices = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)
        self._n_layers = offload.n_layers if offload and pointers else 0
        shares = [float(part.n_layers) for part in offload.parts] if offload else []
        n_shares = max(len(shares), int(libllama.lib().llama_max_devices()))
        self._shares = (ctypes.c_float * n_shares)(*shares)
        self._overrides = _overrides(offload.n_without_experts if offload and pointers else 0)

    def write(self, params: Any) -> None:
        """Set what `params` (llama_model_params) say of devices."""
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.n_gpu_layers = self._n_layers
        if self._n_layers:
            params.tensor_split = ctypes.cast(self._shares, type(params.tensor_split))
        if self._overrides:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)


def _overrides(n_without_experts: int) -> Any:
    if not n_without_experts:
        return None
    numbers = "|".join(map(str, range(n_without_experts)))
    pattern = rf"blk\.({numbers})\.{_EXPERTS}".encode()
    cpu = libllama.base_library().ggml_backend_cpu_buffer_type()
    return (_Override * 2)(_Override(pattern, cpu), _Override(None, None))
