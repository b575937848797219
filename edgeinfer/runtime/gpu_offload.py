"""Move layers to GPUs while the CPU serves requests, and return to the CPU if a device fails.

The model stays loaded for the CPU: its weights are mapped files, whose pages Linux can drop. A thread
loads the model again with layers on devices. Between two steps the engine switches the context: the KV
cache is copied, and the pages of the CPU's KV cache are freed. After a failed step the engine uses the
CPU's context again; running requests restore or recompute their prefixes and continue.

An automatic context may be shorter on devices, so that all layers fit. The switch waits until requests
that are too long for that context have ended on the CPU.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from edgeinfer.errors import DecodeError, EngineClosedError, EngineError
from edgeinfer.media.pictures import Picture
from edgeinfer.platform import process_metadata
from edgeinfer.runtime.layer_plan import Device, LayerPlan, make_layer_plan
from edgeinfer.runtime.llama import backend_loading, libllama, streaming
from edgeinfer.runtime.llama.backends import OffloadRefused, OffloadRequest, find_devices
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.model import LlamaModel, with_another_context
from edgeinfer.runtime.llama.mtmd import Projector
from edgeinfer.runtime.llama.weights import Placement, free_model, open_model
from edgeinfer.runtime.options import Chosen, LayersInfo, LoadOptions, ModelFiles
from edgeinfer.runtime.scheduler.engine_core import EngineCore
from edgeinfer.runtime.vision import Vision
from edgeinfer.units import format_bytes

_log = logging.getLogger("edgeinfer.gpu")
#: If devices run out of memory, loading is tried once more, planned for this share of the free memory.
_SMALLER = 0.85
#: A device encodes pictures only if this much memory (bytes) is free in addition to the projector's
#: weights: 4,096 patches with 16 heads take 1 GiB without flash attention.
_ENCODER_BYTES = 1 << 30
#: Interval (s) between attempts to decode on devices, while a request is too long for their context.
_SWITCH_S = 0.5


@dataclass(eq=False)
class GpuOffloader:
    """Moves the layers of one engine to devices, and back if a device fails.

    `cpu` is the model on the CPU, with its `context`; `loaded` is the model that decodes now. `call`
    runs a function on the decode thread between two steps. After each move between CPU and devices,
    `on_enter` is called with the model that decodes from then on.
    """

    files: ModelFiles
    options: LoadOptions
    cpu: LlamaModel
    context: LlamaContext
    lora: LoraAdapters
    core: EngineCore
    call: Callable[[Callable[[], Any]], Any]
    vision: Vision | None
    on_enter: Callable[[LlamaModel], None]

    def __post_init__(self) -> None:
        self._device_context: DeviceContext | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._note = process_metadata.ProcessRecord(process_metadata.LAYERS)
        self.loaded = self.cpu

    def begin(self, request: OffloadRequest) -> None:
        """Start a thread that moves layers to devices, unless `request` wants none or no GPU exists."""
        if self._thread is None and request.opens_backends():
            self._thread = threading.Thread(
                target=self._main, args=(request,), name="edgeinfer-attach", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until devices are in use or have failed; return False after the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def stop(self) -> bool:
        """Ask the thread to end; return whether a GPU's driver, which may hang, is in use."""
        self._closing.set()
        return self._device_context is not None or not self.wait(0)

    def close(self) -> None:
        """Free the device context. Call it after `stop`, when the decode thread has ended."""
        self.wait()
        if self._device_context is not None:
            self._device_context.loaded.free()
            self._device_context = None

    def _main(self, request: OffloadRequest) -> None:
        """Use the first backend that works; if none does, record the reasons in `choices`."""
        errors: list[Exception] = []
        load = partial(backend_loading.load_after_probe, stop=self._closing)
        try:
            for devices in find_devices(request, load):
                try:
                    self._use(devices, request)
                    return
                except (OffloadRefused, EngineError) as error:
                    if self._closing.is_set() or self._device_context is not None:
                        raise
                    if isinstance(error, EngineError) and not _is_short_of_memory(error):
                        backend_loading.failed[devices[0].backend] = error.message
                    errors.append(error)
        except (OffloadRefused, EngineError) as error:
            errors = [error]
        reason = "; ".join(dict.fromkeys(map(str, errors)))
        self.cpu.choices["gpu_layers"] = Chosen("none", reason)
        is_failure = request.is_explicit or any(isinstance(error, EngineError) for error in errors)
        if is_failure and not self._closing.is_set():
            _log.warning("no layers on a GPU: %s", reason)

    def _use(self, devices: tuple[Device, ...], request: OffloadRequest) -> None:
        plan_layers = partial(make_layer_plan, self.cpu.shape, self.cpu.plan, layers=request.layers)
        layer_plan = plan_layers(devices)
        if not layer_plan.n_layers:
            raise OffloadRefused(layer_plan.reason)
        try:
            device_context = self._load(devices, layer_plan)
        except EngineError as error:
            less_memory = [structs.replace(d, free_bytes=int(_SMALLER * d.free_bytes)) for d in devices]
            smaller = plan_layers(less_memory)
            if not _is_short_of_memory(error) or not 0 < smaller.total_bytes < layer_plan.total_bytes:
                raise
            device_context = self._load(devices, smaller)
        try:
            is_software = all(device.kind == "software" for device in devices)
            # otherwise the first request would wait for the compilation of kernels
            device_context.warm_up(_SOFTWARE_TOKENS if is_software else self.cpu.n_batch)
            while not self.call(lambda: self._switch(device_context)):
                self._closing.wait(_SWITCH_S)
        except BaseException as error:
            # freeing memory on a lost device might never return; a device without kernels is not lost
            is_lost = isinstance(error, DecodeError) and not _is_short_of_memory(error)
            if self._device_context is None and (not is_lost or "no kernel image" in str(error)):
                device_context.loaded.free()
            raise
        if self.vision is not None:
            self._move_encoder(self.vision, device_context)

    def _move_encoder(self, vision: Vision, device_context: DeviceContext) -> None:
        """Encode pictures on the first device that has layers, if the projector fits there too."""
        if self._closing.is_set() or self._device_context is not device_context:
            return
        device, choices = device_context.device, device_context.loaded.choices
        path = self.files.projector
        try:
            needed = os.path.getsize(path) + _ENCODER_BYTES
            free = backend_loading.read_device(device.backend, device.pointer).free_bytes
            if free < needed:
                layers = choices["gpu_layers"]
                memory = f"{format_bytes(needed)} needed, {format_bytes(free)} free"
                note = f"the CPU encodes pictures: {memory}"
                choices["gpu_layers"] = Chosen(layers.value, f"{layers.reason}; {note}")
                return
            projector = Projector(path, self.cpu.model, self.cpu.n_threads, device.pointer)
            projector.encode(Picture(64, 64, bytes(3 * 64 * 64)))  # compiles the kernels
        except (EngineError, OSError) as error:
            _log.warning("%s cannot encode pictures, so the CPU does: %s", device.name, error)
            return

        def use() -> None:
            if self._device_context is device_context:  # otherwise a step has failed
                vision.on_device = projector

        try:
            self.call(use)
        except EngineClosedError:
            use()  # the decode thread has ended, and `Vision.close` must free the projector

    def _load(self, devices: Sequence[Device], layer_plan: LayerPlan) -> DeviceContext:
        """Load the model again with layers on devices. Raises ModelLoadError, OutOfMemoryError."""
        used = [device for device in devices if device.name in layer_plan.devices]
        placement = Placement([device.pointer for device in used], layer_plan)
        model = open_model(self.files.paths, lambda *_: not self._closing.is_set(), placement)
        try:
            adapters = self.lora.load_for(model)  # llama.cpp frees them with the model
            loaded = with_another_context(self.cpu, model, self.options, layer_plan.n_cells)
        except BaseException:
            free_model(model)
            raise
        gpus = ", ".join(device.description for device in used)
        loaded.choices["gpu_layers"] = Chosen(str(layer_plan), layer_plan.reason)
        loaded.choices["gpus"] = Chosen(gpus, "where the layers are")
        context = loaded.llama_context()
        context.adapters = adapters
        return DeviceContext(loaded, context, layer_plan, placement, used[0])

    def _switch(self, device_context: DeviceContext) -> bool:
        """Decode with `device_context` from now on; return False if a running request is too long."""
        if self._closing.is_set():
            raise EngineClosedError("the engine is closed")
        loaded, context = device_context.loaded, device_context.context
        if not self.core.evict_to_fit(loaded.n_ctx, loaded.n_cells):
            return False
        has_copy = self.context.copy_state_to(context)
        self.lora.add_model(loaded.model, context.adapters)
        self.core.prefixes.detach_cache(self.core.queue.running)
        self.core.switch_context(context, loaded.n_ctx, has_copy=has_copy, on_device=True)
        for cached_seq in self.core.kv.cached_sequences:
            # the CPU computed these cells with other rounding than the device: never store them on disk
            cached_seq.is_storable = False
        self.core.on_failed_step = self._fall_back
        self._device_context = device_context
        cpu = self.cpu.llama_context()
        cpu.clear()
        cpu.cells.release_pages()
        streaming.stop(self.cpu)
        self._enter(loaded)
        return True

    def _fall_back(self, error: DecodeError) -> bool:
        """Continue on the CPU, without freeing a lost device; return False if no device was in use."""
        device_context, self._device_context = self._device_context, None
        if device_context is None:
            return False
        if self.vision is not None:
            self.vision.leave_device()
        names = " and ".join(device_context.layer_plan.devices)
        backend_loading.failed[device_context.device.backend] = error.message
        self.cpu.choices["gpu_layers"] = Chosen("none", f"{names} failed: {error.message}")
        _log.warning("%s failed, the CPU continues: %s", names, error.message)
        self.core.prefixes.detach_cache(self.core.queue.running)
        context = self.cpu.llama_context()
        context.adapters = self.lora.remove_second_model()
        self.core.switch_context(context, self.cpu.n_ctx, has_copy=False, on_device=False)
        streaming.start(self.cpu, self.files.paths, self.cpu.plan.streaming)
        self._enter(self.cpu)
        return True

    def _enter(self, loaded: LlamaModel) -> None:
        self.loaded = loaded
        self.on_enter(loaded)
        loaded.llama_context().set_threads(self.cpu.n_threads)
        self.core.prefixes.attach_cache(loaded)
        layers = str(loaded.choices["gpu_layers"].value)
        self._note.write(LayersInfo(model=self.files.name, layers=layers))


def _is_short_of_memory(error: EngineError) -> bool:
    # the regex must not match "illegal memory access": after this error, the device cannot be used
    return bool(re.search(r"alloc|out ?of ?\w*memory", error.message, re.IGNORECASE))


#: Tokens of the warm-up step on a device that is simulated in software (llvmpipe): a whole batch of a
#: 135M model would take a minute.
_SOFTWARE_TOKENS = 64


@dataclass(slots=True)
class DeviceContext:
    """A model with layers on devices, of which `device` is the first.

    `placement` is stored because llama.cpp may read its memory as long as the model exists.
    """

    loaded: LlamaModel
    context: LlamaContext
    layer_plan: LayerPlan
    placement: Placement
    device: Device

    def warm_up(self, n_tokens: int) -> None:
        """Compile the kernels for a prompt of `n_tokens` and for one token. Raises DecodeError.

        Kernels differ by batch size: warmed up with 64 tokens, an H200 with Vulkan took 5 s for 512.
        """
        batch = Batch.of(self.context, max_outputs=1)
        for n in (min(n_tokens, self.loaded.n_batch), 1):
            batch.clear()
            batch.add([i % self.loaded.vocab.n_vocab for i in range(n)], 0, 0, outputs=1)
            if code := batch.decode(self.context):
                raise libllama.decode_error(code, f"{n} tokens")
            self.context.remove(0)
