"""A model's second loading, from the same file, with layers on devices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from edgeinfer.errors import DecodeError, ModelLoadError, OutOfMemoryError
from edgeinfer.platform.machine import read_machine
from edgeinfer.runtime import libllama
from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.loading.load import Loaded, open_model, with_another_context
from edgeinfer.runtime.loading.lora import Held, LoraAdapters
from edgeinfer.runtime.loading.placement import Placement
from edgeinfer.runtime.options import Chosen, LoadOptions
from edgeinfer.runtime.planning.choices import choose_repack
from edgeinfer.runtime.planning.offload import Offload, Room, fewer

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_WARM_UP_TOKENS = 64


@dataclass(slots=True)
class Target:
    """What an engine can go over to. llama.cpp may look into `placement` while the model is there.

    `failed` says what happened to more layers than these, "" when they are those that were planned.
    """

    loaded: Loaded
    active: ActiveContext
    offload: Offload
    placement: Placement
    failed: str = ""

    def warm_up(self) -> None:
        """Have the devices compile what a prompt and an answer need. Raises DecodeError."""
        n_tokens = min(_WARM_UP_TOKENS, self.loaded.n_batch)
        batch = Batch(
            capacity=n_tokens,
            max_outputs=1,
            n_vocab=self.loaded.vocab.n_vocab,
            n_seq_max=1,
            n_cells=self.loaded.n_cells,
        )
        for at, tokens in ((0, list(range(1, 1 + n_tokens))), (n_tokens, [1])):
            batch.clear()
            batch.add(tokens, at, 0, outputs=1)
            if code := batch.decode(self.active):
                raise DecodeError(f"llama_decode returned {code} for {len(tokens)} tokens")
        libllama.L.llama_memory_seq_rm(self.active.memory, 0, -1, -1)


class NoTarget(Exception):
    """Layers cannot lie on devices; the reason in words."""


def load_target(
    paths: tuple[str, ...],
    options: LoadOptions,
    cpu: Loaded,
    lora: LoraAdapters,
    devices: Sequence[Device],
    rooms: tuple[Room, ...],
    planned: Offload,
) -> Target:
    """Load `cpu`'s model again as `planned`, with fewer layers if they do not fit. Raises NoTarget."""
    offload, failed = planned, ""
    while offload.parts:
        try:
            found = _load(paths, options, cpu, devices, offload)
            found.active.adapters = _adapters(lora, found)
        except (ModelLoadError, OutOfMemoryError) as error:
            failed = failed or error.message
            offload = fewer(cpu.shape, cpu.plan, rooms, offload)
            continue
        found.failed = failed
        return found
    raise NoTarget(failed or offload.reason)


def _adapters(lora: LoraAdapters, target: Target) -> Held:
    try:
        return lora.open(target.loaded.model)
    except BaseException:
        target.loaded.free()
        raise


def _load(
    paths: tuple[str, ...],
    options: LoadOptions,
    cpu: Loaded,
    devices: Sequence[Device],
    offload: Offload,
) -> Target:
    pointers = {device.name: device.pointer for device in devices}
    placement = Placement([pointers[part.device] for part in offload.parts], offload)
    on_devices = sum(part.weights_bytes for part in offload.parts)
    rest = max(0, cpu.shape.weights_bytes - on_devices)
    repack = choose_repack(options.repack, rest, read_machine())
    options = msgspec.structs.replace(options, repack=repack.value)
    model = open_model(paths, options, placement=placement)
    try:
        loaded = with_another_context(cpu, model, options)
    except BaseException:
        libllama.L.llama_model_free(model)
        raise
    layers = Chosen(str(offload), offload.reason)
    loaded = replace(loaded, choices=cpu.choices | {"gpu_layers": layers})
    return Target(
        loaded, ActiveContext(loaded.context, loaded.memory, loaded.cells), offload, placement
    )


def move_state(source: ActiveContext, target: ActiveContext) -> bool:
    """Give one context everything that another has computed. False when it does not take it."""
    llama = libllama.L
    size = int(llama.llama_state_get_size(source.context))
    state = np.empty(size, np.uint8)
    pointer = state.ctypes.data_as(_BYTES)
    n = int(llama.llama_state_get_data(source.context, pointer, size))
    return bool(n and llama.llama_state_set_data(target.context, pointer, n) == n)
