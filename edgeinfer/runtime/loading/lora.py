"""LoRA adapters: loaded once with the model, set on the context for the sequences of one step."""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

from edgeinfer.errors import DecodeError, InvalidRequestError, ModelLoadError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey
from edgeinfer.runtime.libllama import L


class LoraAdapters:
    """A model's adapters by name.

    Those of the active context's model. `use` is for the decode loop's thread.
    """

    def __init__(self, active: ActiveContext, wanted: dict[str, tuple[str, float]]) -> None:
        self._active = active
        self._scales = {name: scale for name, (_, scale) in wanted.items()}
        self._current: AdapterKey = ()
        self._context = active.context

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._active.adapters)

    def key(self, wanted: tuple[tuple[str, float], ...] | None) -> AdapterKey:
        """What a request's adapters amount to: sorted by name, without scale 0.

        None is all of them, each at the scale it was loaded with. Raises InvalidRequestError.
        """
        if wanted is None:
            wanted = tuple((name, self._scales[name]) for name in self.names)
        scales: dict[str, float] = {}
        for name, scale in wanted:
            if name not in self.names:
                known = ", ".join(self.names) or "none"
                raise InvalidRequestError(f'no LoRA adapter "{name}"; loaded: {known}', param="lora")
            if name in scales:
                raise InvalidRequestError(f'LoRA adapter "{name}" is named twice', param="lora")
            if not math.isfinite(scale) or abs(scale) > 100:
                raise InvalidRequestError("a LoRA scale is between -100 and 100", param="lora")
            scales[name] = float(scale)
        return tuple(sorted((name, scale) for name, scale in scales.items() if scale))

    def use(self, adapters: AdapterKey) -> None:
        """Set the context's adapters; nothing happens when they are set already. Raises DecodeError."""
        context = self._active.context
        if adapters == self._current and context is self._context:
            return
        pointers = (L.llama_adapter_lora_p_ctypes * max(1, len(adapters)))(
            *(self._active.adapters[name] for name, _ in adapters)
        )
        scales = (ctypes.c_float * max(1, len(adapters)))(*(scale for _, scale in adapters))
        if L.llama_set_adapters_lora(context, pointers, len(adapters), scales):
            raise DecodeError("llama.cpp refused the LoRA adapters")
        self._current, self._context = adapters, context


def load_adapters(model: Any, wanted: dict[str, tuple[str, float]]) -> dict[str, Any]:
    """Load adapters, name → path and scale; they are freed with the model. Raises ModelLoadError."""
    return {name: _load(model, name, path) for name, (path, _) in wanted.items()}


def _load(model: Any, name: str, path: str) -> Any:
    if not os.path.isfile(path):
        raise ModelLoadError(f'LoRA adapter "{name}": {path} is not there')
    libllama.clear_log()
    adapter = L.llama_adapter_lora_init(model, os.fsencode(path))
    if not adapter:
        words = "; ".join(libllama.recent_log(3)) or "no reason given"
        raise ModelLoadError(f'LoRA adapter "{name}" does not fit this model: {words}')
    return adapter
