"""The LoRA adapters of an engine: load them, name them in requests, unload them while it runs.

edgeinfer's kernels apply adapters to single rows of a batch (row_adapters.py). Adapters that the
kernels cannot compute are set on llama.cpp's context, and apply to all sequences of a step.
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
#: Loaded adapters by the stamps of their files (path, size, mtime, inode).
AdaptersByStamp = dict[str, LoadedAdapter]


class LoraAdapters:
    """Loads and unloads an engine's adapters, and translates their names in requests.

    After layers have moved to a GPU, the engine has a second model, for which every adapter is loaded
    too. `key` may be called on any thread; the other methods only on the decode thread, between steps.
    A caller holds `lock` while it calls `key` and queues the request; otherwise one of the request's
    adapters might be unloaded before the request is queued.
    """

    def __init__(self, model: Any, context: LlamaContext, adapters: Sequence[Adapter]) -> None:
        """Load the adapters. Raises ModelLoadError."""
        self.lock = threading.Lock()
        self._context = context
        self._named: dict[str, tuple[Adapter, str]] = {}
        self._current: AdapterKey = ()
        self._pointer = context.pointer
        self._models: list[tuple[Any, AdaptersByStamp]] = [(model, context.adapters)]
        #: Whether edgeinfer's kernels can apply adapters. They cannot in recurrent and hybrid models,
        #: because llama.cpp reorders the tokens of a batch there.
        self.has_kernels = not (L.llama_model_is_recurrent(model) or L.llama_model_is_hybrid(model))
        self.change(adapters)

    @property
    def named_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name, in the order of loading."""
        return tuple(adapter for adapter, _ in self._named.values())

    def key(self, requested: tuple[tuple[str, float], ...] | None) -> AdapterKey:
        """Convert adapter names and scales of a request to an AdapterKey, without adapters of scale 0.

        None means all adapters at their default scales. Raises InvalidRequestError for a name that is
        unknown or given twice, or a scale that is out of range.
        """
        if requested is None:
            requested = tuple((adapter.name, adapter.scale) for adapter in self.named_adapters)
        scales: dict[str, float] = {}
        for name, scale in requested:
            if name not in self._named:
                names = ", ".join(self._named) or "none"
                problem = f'the LoRA adapter "{name}" is not loaded; loaded: {names}'
                hint = "name a loaded adapter, or load this one with `--lora ADAPTER`"
                raise InvalidRequestError(problem, param="lora", hint=hint)
            stamp = self._named[name][1]
            if stamp in scales:
                problem = f'the request names the LoRA adapter "{name}" twice'
                raise InvalidRequestError(problem, param="lora", hint="name each adapter once")
            _check_scale(scale)
            scales[stamp] = float(scale)
        return tuple(sorted((stamp, scale) for stamp, scale in scales.items() if scale))

    def with_scales(self, adapters: AdapterKey) -> tuple[Adapter, ...]:
        """Convert a key, which `key` has just returned, to adapters with the key's scales."""
        by_stamp = {stamp: adapter for adapter, stamp in self._named.values()}
        return tuple(msgspec.structs.replace(by_stamp[stamp], scale=scale) for stamp, scale in adapters)

    def of_context(self, adapters: AdapterKey) -> AdapterKey:
        """Return those of `adapters` that can only be applied to all rows of a batch, by llama.cpp."""
        loaded = self._context.adapters
        return tuple(pair for pair in adapters if not loaded[pair[0]].is_per_row)

    def use(self, adapters: AdapterKey) -> None:
        """Let llama.cpp apply `adapters` (a result of `of_context`) to all rows of the next batches.

        A change costs a graph reservation. Raises DecodeError if llama.cpp fails.
        """
        pointer = self._context.pointer
        if adapters == self._current and pointer is self._pointer:
            return
        pointers = (L.llama_adapter_lora_p_ctypes * max(1, len(adapters)))(
            *(self._context.adapters[stamp].pointer for stamp, _ in adapters)
        )
        scales = (ctypes.c_float * max(1, len(adapters)))(*(scale for _, scale in adapters))
        if code := L.llama_set_adapters_lora(pointer, pointers, len(adapters), scales):
            raise DecodeError(f"llama.cpp could not set {len(adapters)} LoRA adapters (code {code})")
        self._current, self._pointer = adapters, pointer

    def use_llama_cpp(self) -> None:
        """Let llama.cpp compute every adapter from now on, instead of edgeinfer's faster kernels."""
        _log.warning("edgeinfer's kernels cannot compute this LoRA adapter: llama.cpp does, slower")
        self.has_kernels = False
        for loaded in self._context.adapters.values():
            loaded.use_llama_cpp()

    def change(self, adapters: Sequence[Adapter]) -> None:
        """Load `adapters`; from then on, requests may name only these.

        Adapters that were loaded before stay loaded until `release`. If the method raises
        InvalidRequestError or ModelLoadError, nothing has changed.
        """
        named = {adapter.name: (adapter, _stamp(adapter)) for adapter in adapters}
        if len({stamp for _, stamp in named.values()}) < len(adapters):
            problem = f"two of these LoRA adapters have the same name or file: {', '.join(named)}"
            raise InvalidRequestError(problem, param="lora", hint="name each adapter and file once")
        for adapter in adapters:
            _check_scale(adapter.scale)
        stamps_before = self._loaded_stamps()
        try:
            for model, by_stamp in self._models:
                self._load_missing(model, by_stamp, named)
        except BaseException:
            self._free_others(stamps_before)
            raise
        by_stamp = self._models[0][1]
        for name, (adapter, stamp) in named.items():
            named[name] = (msgspec.structs.replace(adapter, sha256=by_stamp[stamp].sha256), stamp)
        with self.lock:
            self._named = named

    def removed_stamps(self) -> frozenset[str]:
        """Return the stamps (see `AdapterKey`) of loaded adapters that requests can no longer name."""
        return self._loaded_stamps() - {stamp for _, stamp in self._named.values()}

    def release(self) -> None:
        """Free the adapters that `change` has removed. No running request may use one."""
        if removed := self.removed_stamps():
            self.use(())
            self._free_others(self._loaded_stamps() - removed)

    def _loaded_stamps(self) -> frozenset[str]:
        return frozenset(stamp for _, by_stamp in self._models for stamp in by_stamp)

    def _free_others(self, stamps: frozenset[str]) -> None:
        for _, by_stamp in self._models:
            for stamp in by_stamp.keys() - stamps:
                by_stamp.pop(stamp).free()

    def load_for(self, model: Any) -> AdaptersByStamp:
        """Load all adapters for a second model, and return them for `add_model`. Thread-safe.

        Raises ModelLoadError.
        """
        by_stamp: AdaptersByStamp = {}
        self._load_missing(model, by_stamp, self._named)
        return by_stamp

    def add_model(self, model: Any, by_stamp: AdaptersByStamp) -> None:
        """Add a second model, for which `load_for` has returned the adapters `by_stamp`.

        Adapters that `change` has added since then are loaded too. Raises ModelLoadError.
        """
        self._load_missing(model, by_stamp, self._named)
        self._models.append((model, by_stamp))

    def remove_second_model(self) -> AdaptersByStamp:
        """Remove the second model without freeing its adapters; return the first model's adapters."""
        del self._models[1:]
        return self._models[0][1]

    def close(self) -> None:
        """Free the first model's adapters. Call it before that model is freed."""
        self.remove_second_model()
        self._free_others(frozenset())

    def _load_missing(
        self, model: Any, by_stamp: AdaptersByStamp, named: dict[str, tuple[Adapter, str]]
    ) -> None:
        for adapter, stamp in named.values():
            if stamp not in by_stamp:
                by_stamp[stamp] = _load(model, adapter, stamp)
                if self.has_kernels and model is self._models[0][0]:  # the kernels run only on the CPU
                    by_stamp[stamp].use_kernels()


def _check_scale(scale: float) -> None:
    if not math.isfinite(scale) or abs(scale) > 100:
        problem = f"a LoRA scale of {scale:g} is not between -100 and 100"
        raise InvalidRequestError(problem, param="lora")


def _stamp(adapter: Adapter) -> str:
    try:
        return stamps([os.path.realpath(adapter.path)])
    except OSError:
        raise ModelLoadError(
            f'LoRA adapter "{adapter.name}": there is no file {adapter.path}',
            hint="pull it first: `edgeinfer pull ADAPTER --base MODEL`; or give the path of its file",
        ) from None


def _load(model: Any, adapter: Adapter, stamp: str) -> LoadedAdapter:
    libllama.clear_log()
    pointer = libllama.call(L.llama_adapter_lora_init, model, os.fsencode(adapter.path))
    if not pointer:
        reason = libllama.recent_reason()
        if "invalid magic" in reason or "general.type" in reason:
            problem = f'LoRA adapter "{adapter.name}": {adapter.path} is not an adapter in GGUF form'
            hint = "`edgeinfer pull FOLDER --base MODEL` converts a folder that PEFT has saved"
            raise ModelLoadError(problem, hint=hint)
        problem = f'LoRA adapter "{adapter.name}" does not fit this model: {reason}'
        raise ModelLoadError(problem, hint="use an adapter that was trained on this model")
    alpha = _alpha(pointer)
    if not abs(alpha) <= MOST_ALPHA:  # also true for NaN
        L.llama_adapter_lora_free(pointer)
        raise ModelLoadError(
            f'LoRA adapter "{adapter.name}" has an alpha of {alpha:g}; the limit is {MOST_ALPHA:g}',
            hint="the adapter's file is damaged: pull or convert it again",
        )
    if not (sha256 := _digest(adapter, stamp)):
        L.llama_adapter_lora_free(pointer)
        problem = f'LoRA adapter "{adapter.name}": {adapter.path} was changed while it was loaded'
        raise ModelLoadError(problem, hint="load the adapter again")
    return LoadedAdapter(pointer, sha256)


def _digest(adapter: Adapter, stamp: str) -> str:
    """Return the SHA-256 of an adapter's file, "" if the file no longer has this stamp."""
    with contextlib.suppress(OSError, ModelLoadError):
        sha256 = sha256_of(Path(adapter.path))
        return sha256 if _stamp(adapter) == stamp else ""
    return ""


def _alpha(pointer: Any) -> float:
    """Return an adapter's alpha, 0 if it has none. llama.cpp multiplies the adapter by alpha / rank."""
    text = ctypes.create_string_buffer(64)
    n = L.llama_adapter_meta_val_str(pointer, b"adapter.lora.alpha", text, len(text))
    return float(text.value) if n > 0 else 0.0
