"""LoRA adapters: loaded once with the model, set on the context for the sequences of one step."""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

from edgeinfer.errors import DecodeError, InvalidRequestError, ModelLoadError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey
from edgeinfer.runtime.libllama import L


class LoraAdapters:
    """A model's adapters by name.

    Loaded at load time; freed with the model. `use` is for the decode loop's thread.
    """

    def __init__(self, model: Any, context: Any, paths: dict[str, str]) -> None:
        self._context = context
        self._current: AdapterKey = ()
        self._adapters = {name: _load(model, name, path) for name, path in paths.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def key(self, wanted: tuple[tuple[str, float], ...] | None) -> AdapterKey:
        """What a request's adapters amount to: sorted by name, without scale 0; None is all at scale 1.

        Raises InvalidRequestError.
        """
        if wanted is None:
            wanted = tuple((name, 1.0) for name in self._adapters)
        scales: dict[str, float] = {}
        for name, scale in wanted:
            if name not in self._adapters:
                known = ", ".join(self._adapters) or "none"
                raise InvalidRequestError(f'no LoRA adapter "{name}"; loaded: {known}', param="lora")
            if name in scales:
                raise InvalidRequestError(f'LoRA adapter "{name}" is named twice', param="lora")
            if not math.isfinite(scale) or abs(scale) > 100:
                raise InvalidRequestError("a LoRA scale is between -100 and 100", param="lora")
            scales[name] = float(scale)
        return tuple(sorted((name, scale) for name, scale in scales.items() if scale))

    def use(self, adapters: AdapterKey) -> None:
        """Set the context's adapters; nothing happens when they are set already. Raises DecodeError."""
        if adapters == self._current:
            return
        pointers = (L.llama_adapter_lora_p_ctypes * max(1, len(adapters)))(
            *(self._adapters[name] for name, _ in adapters)
        )
        scales = (ctypes.c_float * max(1, len(adapters)))(*(scale for _, scale in adapters))
        if L.llama_set_adapters_lora(self._context, pointers, len(adapters), scales):
            raise DecodeError("llama.cpp refused the LoRA adapters")
        self._current = adapters


def _load(model: Any, name: str, path: str) -> Any:
    if not os.path.isfile(path):
        raise ModelLoadError(f'LoRA adapter "{name}": {path} is not there')
    libllama.clear_log()
    adapter = L.llama_adapter_lora_init(model, os.fsencode(path))
    if not adapter:
        words = "; ".join(libllama.recent_log(3)) or "no reason given"
        raise ModelLoadError(f'LoRA adapter "{name}" does not fit this model: {words}')
    return adapter
