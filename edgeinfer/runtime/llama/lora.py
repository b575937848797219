"""LoRA adapters, loaded with the model or while it runs. Adapters that the kernels cannot add to single
rows (row_adapters.py) are set on the context for all sequences of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, InvalidRequestError, ModelLoadError
from edgeinfer.platform.disk import sha256_of, stamps
from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.row_adapters import LoadedAdapter
from edgeinfer.runtime.options import MOST_ALPHA, Adapter

_log = logging.getLogger("edgeinfer.engine")
#: The adapters of one model by the stamps of their files.
Held = dict[str, LoadedAdapter]


class LoraAdapters:
    """The adapters of an engine by name, for every model that it may decode with.

    `key` may be called on any thread; all other methods run on the decode thread, between two steps.
    `lock` is held from getting a request's key until it is queued: no adapter is unloaded meanwhile.
    """

    def __init__(self, model: Any, context: LlamaContext, adapters: Sequence[Adapter]) -> None:
        """Load the adapters. Raises ModelLoadError."""
        self.lock = threading.Lock()
        self._context = context
        self._named: dict[str, tuple[Adapter, str]] = {}
        self._current: AdapterKey = ()
        self._pointer = context.pointer
        self._homes: list[tuple[Any, Held]] = [(model, context.adapters)]
        #: Whether kernels add adapters to single rows. Recurrent models reorder the rows of a batch.
        self.has_kernels = not (L.llama_model_is_recurrent(model) or L.llama_model_is_hybrid(model))
        self.change(adapters)

    @property
    def named_adapters(self) -> tuple[Adapter, ...]:
        """Adapters that requests may name, in the order of loading."""
        return tuple(adapter for adapter, _ in self._named.values())

    def key(self, requested: tuple[tuple[str, float], ...] | None) -> AdapterKey:
        """Convert a request's adapters to the stamps of their files, sorted, without scale 0.

        None means all adapters, each at its loaded scale. Raises InvalidRequestError.
        """
        if requested is None:
            requested = tuple((adapter.name, adapter.scale) for adapter in self.named_adapters)
        scales: dict[str, float] = {}
        for name, scale in requested:
            if name not in self._named:
                names = ", ".join(self._named) or "none"
                raise InvalidRequestError(f'no LoRA adapter "{name}"; loaded: {names}', param="lora")
            stamp = self._named[name][1]
            if stamp in scales:
                raise InvalidRequestError(f'LoRA adapter "{name}" is named twice', param="lora")
            _check_scale(scale)
            scales[stamp] = float(scale)
        return tuple(sorted((stamp, scale) for stamp, scale in scales.items() if scale))

    def with_scales(self, adapters: AdapterKey) -> tuple[Adapter, ...]:
        """Return the adapters of a key that was just made, each at its scale there."""
        by_stamp = {stamp: adapter for adapter, stamp in self._named.values()}
        return tuple(msgspec.structs.replace(by_stamp[stamp], scale=scale) for stamp, scale in adapters)

    def of_context(self, adapters: AdapterKey) -> AdapterKey:
        """Return those `adapters` that llama.cpp computes; all rows of a step must share them."""
        loaded = self._context.adapters
        return tuple(pair for pair in adapters if not loaded[pair[0]].is_per_row)

    def use(self, adapters: AdapterKey) -> None:
        """Set the context's adapters, if they differ from the current ones. Raises DecodeError.

        After a change, llama.cpp reserves its graph again.
        """
        pointer = self._context.pointer
        if adapters == self._current and pointer is self._pointer:
            return
        pointers = (L.llama_adapter_lora_p_ctypes * max(1, len(adapters)))(
            *(self._context.adapters[stamp].pointer for stamp, _ in adapters)
        )
        scales = (ctypes.c_float * max(1, len(adapters)))(*(scale for _, scale in adapters))
        if L.llama_set_adapters_lora(pointer, pointers, len(adapters), scales):
            raise DecodeError("llama.cpp could not set the LoRA adapters")
        self._current, self._pointer = adapters, pointer

    def leave_kernels(self) -> None:
        """Let llama.cpp compute every adapter from now on."""
        _log.warning("our kernels cannot add this model's LoRA adapters: llama.cpp computes them")
        self.has_kernels = False
        for loaded in self._context.adapters.values():
            loaded.leave_kernels()

    def change(self, adapters: Sequence[Adapter]) -> None:
        """Let requests name these adapters, and no others. Removed ones stay loaded until `release`.

        If it raises (InvalidRequestError, ModelLoadError), nothing has changed.
        """
        named = {adapter.name: (adapter, _stamp(adapter)) for adapter in adapters}
        if len({stamp for _, stamp in named.values()}) < len(adapters):
            raise InvalidRequestError("an adapter or its name is given twice", param="lora")
        for adapter in adapters:
            _check_scale(adapter.scale)
        before = self._homes_held()
        try:
            for model, held in self._homes:
                self._fill(model, held, named)
        except BaseException:
            self._free_but(before)
            raise
        held = self._homes[0][1]
        for name, (adapter, stamp) in named.items():
            named[name] = (msgspec.structs.replace(adapter, sha256=held[stamp].sha256), stamp)
        with self.lock:
            self._named = named

    def removed_stamps(self) -> frozenset[str]:
        """List the stamps of removed adapters that are still loaded."""
        return self._homes_held() - {stamp for _, stamp in self._named.values()}

    def release(self) -> None:
        """Free removed adapters, which no running request uses."""
        if removed := self.removed_stamps():
            self.use(())
            self._free_but(self._homes_held() - removed)

    def _homes_held(self) -> frozenset[str]:
        return frozenset(stamp for _, held in self._homes for stamp in held)

    def _free_but(self, stamps: frozenset[str]) -> None:
        for _, held in self._homes:
            for stamp in held.keys() - stamps:
                held.pop(stamp).free()

    def open(self, model: Any) -> Held:
        """Load all adapters for another model. Usable on any thread. Raises ModelLoadError."""
        held: Held = {}
        self._fill(model, held, self._named)
        return held

    def attach(self, model: Any, held: Held) -> None:
        """Keep the adapters `held`, loaded by `open` for `model`, up to date. Raises ModelLoadError."""
        self._fill(model, held, self._named)
        self._homes.append((model, held))

    def detach(self) -> Held:
        """Forget the second model; return its adapters."""
        del self._homes[1:]
        return self._homes[0][1]

    def close(self) -> None:
        """Free the first model's adapters. Call it before the model is freed."""
        self.detach()
        self._free_but(frozenset())

    def _fill(self, model: Any, held: Held, named: dict[str, tuple[Adapter, str]]) -> None:
        for adapter, stamp in named.values():
            if stamp not in held:
                held[stamp] = _load(model, adapter, stamp)
                if self.has_kernels and model is self._homes[0][0]:  # later models are on devices
                    held[stamp].use_kernels()


def _check_scale(scale: float) -> None:
    if not math.isfinite(scale) or abs(scale) > 100:
        raise InvalidRequestError("a LoRA scale must be between -100 and 100", param="lora")


def _stamp(adapter: Adapter) -> str:
    try:
        return stamps([os.path.realpath(adapter.path)])
    except OSError:
        raise ModelLoadError(
            f'LoRA adapter "{adapter.name}": there is no {adapter.path}',
            hint="pull it first: `edgeinfer pull ADAPTER --base MODEL`; or give the path of its file",
        ) from None


def _load(model: Any, adapter: Adapter, stamp: str) -> LoadedAdapter:
    libllama.clear_log()
    pointer = libllama.call(L.llama_adapter_lora_init, model, os.fsencode(adapter.path))
    if not pointer:
        reason = libllama.recent_reason()
        problem = f'LoRA adapter "{adapter.name}" does not fit this model: {reason}'
        raise ModelLoadError(problem, hint="use an adapter that was trained on this model")
    alpha = _alpha(pointer)
    if not abs(alpha) <= MOST_ALPHA:  # NaN compares as false
        L.llama_adapter_lora_free(pointer)
        raise ModelLoadError(
            f'LoRA adapter "{adapter.name}" has an alpha of {alpha:g}, which makes answers noise',
            hint="its file is damaged: fetch or convert it again",
        )
    if not (sha256 := _digest(adapter, stamp)):
        L.llama_adapter_lora_free(pointer)
        problem = f'LoRA adapter "{adapter.name}": {adapter.path} was changed while it was loaded'
        raise ModelLoadError(problem, hint="try again")
    return LoadedAdapter(pointer, sha256)


def _digest(adapter: Adapter, stamp: str) -> str:
    """Return the SHA-256 of an adapter's file; "" if the file was changed since `stamp`."""
    with contextlib.suppress(OSError, ModelLoadError):
        sha256 = sha256_of(Path(adapter.path))
        return sha256 if _stamp(adapter) == stamp else ""
    return ""


def _alpha(pointer: Any) -> float:
    """Return an adapter's alpha (llama.cpp scales the adapter by alpha / rank); 0 if it has none."""
    text = ctypes.create_string_buffer(64)
    n = L.llama_adapter_meta_val_str(pointer, b"adapter.lora.alpha", text, len(text))
    return float(text.value) if n > 0 else 0.0
