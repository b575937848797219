"""Move layers to GPUs while the CPU serves requests, and return to the CPU if a device fails.

The model stays loaded for the CPU: its weights are mapped files, which take no memory that other
programs need. A thread loads it again with layers on devices. Between two steps the engine switches the
context: the computed state moves, and the pages of the CPU's KV cache are returned. After a failed step
the CPU's context is used again; running requests restore or recompute their prefixes and continue.

An automatic context may be shorter on devices, so that all layers fit. Longer requests end on the CPU
before the switch.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer.errors import DecodeError, EngineClosedError, EngineError
from edgeinfer.media.pictures import Picture
from edgeinfer.platform import process_metadata
from edgeinfer.runtime.llama import backend_loading, backends, libllama
from edgeinfer.runtime.llama.backends import Device, LoadedBackend, MissingBackend, OffloadRequest
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.model import LlamaModel, with_another_context
from edgeinfer.runtime.llama.mtmd import Projector
from edgeinfer.runtime.llama.weights import Placement, free_model, open_model
from edgeinfer.runtime.offload_plan import Offload, make_offload
from edgeinfer.runtime.options import Chosen, LayersInfo, LoadOptions, ModelFiles
from edgeinfer.runtime.scheduler.engine_core import EngineCore
from edgeinfer.runtime.scheduler.prefix_cache_switch import PrefixCacheSwitch
from edgeinfer.runtime.vision import Vision
from edgeinfer.units import format_bytes

_log = logging.getLogger("edgeinfer.gpu")
#: Share of the free memory for the second, smaller attempt on the same devices.
_SMALLER = 0.85
#: Free memory (bytes) of a device, next to a projector's weights, for which it encodes pictures: 4,096
#: patches with 16 heads take 1 GiB without flash attention.
_ENCODER_BYTES = 1 << 30
#: Interval (s) between attempts to switch while a request is too long for the devices' context.
_SWITCH_S = 0.5


@dataclass(eq=False)
class GpuOffload:
    """Moves the layers of one engine to devices, and back if a device fails.

    `cpu` is the model as first loaded, `loaded` the one in use, whose `context` decodes. `call` runs
    work between two steps; `on_enter` is called between two steps with the model that decodes next.
    """

    files: ModelFiles
    options: LoadOptions
    cpu: LlamaModel
    context: LlamaContext
    lora: LoraAdapters
    core: EngineCore
    call: Callable[[Callable[[], Any]], Any]
    prefix_cache_switch: PrefixCacheSwitch
    vision: Vision | None
    on_enter: Callable[[LlamaModel], None]

    def __post_init__(self) -> None:
        self._device_context: DeviceContext | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._note = process_metadata.ProcessRecord(process_metadata.LAYERS)
        self.loaded = self.cpu

    def begin(self, request: OffloadRequest) -> None:
        """Attach the devices of `request` in the background; a failure is logged once.

        Without a GPU no backend is opened, unless layers are requested.
        """
        if self._thread is None and request.opens_backends():
            self._thread = threading.Thread(
                target=self._main, args=(request,), name="edgeinfer-attach", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until devices are attached, or have failed; return False after the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def close(self) -> None:
        """Stop attaching, and free the device context. Only after the decode thread has ended."""
        self._is_closing = True
        self.wait()
        if self._device_context is not None:
            self._device_context.loaded.free()
            self._device_context = None

    def _main(self, request: OffloadRequest) -> None:
        try:
            self._attach(request)
        except (OffloadRefused, EngineError) as error:
            self.cpu.choices["gpu_layers"] = Chosen("none", str(error))
            is_failure = request.is_explicit or not isinstance(error, OffloadRefused)
            if is_failure and not self._is_closing:
                _log.warning("no layers on a GPU: %s", error)

    def _attach(self, request: OffloadRequest) -> None:
        """Use the first backend that works; each may fail or refuse for its own reason."""
        failures: list[Exception] = []
        for devices in find_devices(request):
            try:
                self._use(devices, request)
                return
            except (OffloadRefused, EngineError) as error:
                if self._is_closing or self._device_context is not None:
                    raise
                if isinstance(error, EngineError) and not _is_short_of_memory(error):
                    _failed[devices[0].backend] = error.message
                failures.append(error)
        reason = "; ".join(dict.fromkeys(map(str, failures)))
        is_refused = all(isinstance(error, OffloadRefused) for error in failures)
        raise (OffloadRefused if is_refused else DecodeError)(reason)

    def _use(self, devices: tuple[Device, ...], request: OffloadRequest) -> None:
        offload = self._plan(devices, request, 1.0)
        if not offload.n_layers:
            raise OffloadRefused(offload.reason)
        try:
            device_context = self._load(devices, offload)
        except EngineError as error:
            smaller = self._plan(devices, request, _SMALLER)
            if not _is_short_of_memory(error) or not 0 < smaller.total_bytes < offload.total_bytes:
                raise
            device_context = self._load(devices, smaller)
        try:
            is_software = all(device.kind == "software" for device in devices)
            # otherwise the first request would wait for the compilation
            device_context.warm_up(_SOFTWARE_TOKENS if is_software else self.cpu.n_batch)
            while not self.call(lambda: self._switch(device_context)):
                time.sleep(_SWITCH_S)
        except BaseException as error:
            # freeing memory on a lost device could wait forever, so it is not freed
            is_lost = isinstance(error, DecodeError) and not _leaves_device_usable(error)
            if self._device_context is None and not is_lost:
                device_context.loaded.free()
            raise
        if self.vision is not None:
            self._move_encoder(self.vision, device_context, request)

    def _plan(self, devices: Sequence[Device], request: OffloadRequest, share: float) -> Offload:
        """Plan with this share of each device's free memory."""
        memories = tuple(request.usable_memory(device, share) for device in devices)
        return make_offload(self.cpu.shape, self.cpu.plan, memories, request.layers)

    def _move_encoder(self, vision: Vision, on: DeviceContext, request: OffloadRequest) -> None:
        """Encode pictures on the first device with layers, if the projector fits next to them."""
        if self._is_closing or self._device_context is not on:
            return
        answer, path = backend_loading.load(on.backend), self.files.projector
        devices = answer.devices if isinstance(answer, LoadedBackend) else ()
        device = next((device for device in devices if device.name == on.offload.devices[0]), None)
        try:
            needed = os.path.getsize(path) + _ENCODER_BYTES
            free = request.usable_memory(device).free_bytes if device else 0
            if device is None or free < needed:
                layers: Chosen = on.loaded.choices["gpu_layers"]
                room = f"{format_bytes(free)} of {format_bytes(needed)}"
                note = f"the CPU encodes pictures: {room} are free"
                on.loaded.choices["gpu_layers"] = Chosen(layers.value, f"{layers.reason}; {note}")
                return
            projector = Projector(path, self.cpu.model, self.cpu.n_threads, device.pointer)
            projector.encode(Picture(64, 64, bytes(3 * 64 * 64)))  # compiles the kernels
        except (EngineError, OSError) as error:
            _log.warning("%s cannot encode pictures, the CPU does: %s", on.offload.devices[0], error)
            return

        def use() -> None:
            if self._device_context is on:  # a failed step may have left it meanwhile
                vision.on_device = projector

        try:
            self.call(use)
        except EngineClosedError:
            use()  # no step follows, and closing frees it

    def _load(self, devices: Sequence[Device], offload: Offload) -> DeviceContext:
        """Load the model again with layers on devices. Raises ModelLoadError, OutOfMemoryError."""
        cpu = self.cpu
        pointers = {device.name: device.pointer for device in devices}
        placement = Placement([pointers[name] for name in offload.devices], offload)
        model = open_model(self.files.paths, placement=placement)
        try:
            loaded = with_another_context(cpu, model, self.options, offload.n_cells)
        except BaseException:
            free_model(model)
            raise
        cards = {device.name: device.description for device in devices}
        chosen = {
            "gpu_layers": Chosen(str(offload), offload.reason),
            "gpus": Chosen(", ".join(cards[name] for name in offload.devices), "where the layers are"),
        }
        loaded = replace(loaded, choices=loaded.choices | chosen)
        context = loaded.llama_context()
        try:
            context.adapters = self.lora.load_for(model)
        except BaseException:
            loaded.free()
            raise
        return DeviceContext(loaded, context, offload, placement, devices[0].backend)

    def _switch(self, device_context: DeviceContext) -> bool:
        """Decode with `device_context` from now on; return False if a request is too long for it.

        Only between steps.
        """
        if self._is_closing:
            raise EngineClosedError("the engine is closed")
        loaded, context = device_context.loaded, device_context.context
        if not self.core.evict_to_fit(loaded.n_ctx, loaded.n_cells):
            return False
        has_copy = self.context.copy_state_to(context)
        self.lora.add_model(loaded.model, context.adapters)
        self.prefix_cache_switch.detach()
        self.core.switch_context(context, loaded.n_ctx, has_copy=has_copy, on_device=True)
        for cached_seq in self.core.kv.cached_sequences:
            # do not store it: another context computed it, with different rounding
            cached_seq.is_storable = False
        self.core.on_failed_step = self._fall_back
        self._device_context = device_context
        cpu = self.cpu.llama_context()
        cpu.clear()
        cpu.cells.release_pages()
        self.cpu.stop_streaming()
        self._enter(loaded)
        return True

    def _fall_back(self, error: DecodeError) -> bool:
        """Continue on the CPU. The device context is not used again: a lost device may never answer."""
        device_context, self._device_context = self._device_context, None
        if device_context is None:
            return False
        if self.vision is not None:
            self.vision.leave_device()
        names = " and ".join(device_context.offload.devices)
        _failed[device_context.backend] = error.message
        self.cpu.choices["gpu_layers"] = Chosen("none", f"{names} failed: {error.message}")
        _log.warning("%s failed, the CPU continues: %s", names, error.message)
        self.prefix_cache_switch.detach()
        context = self.cpu.llama_context()
        context.adapters = self.lora.remove_second_model()
        self.core.switch_context(context, self.cpu.n_ctx, has_copy=False, on_device=False)
        self.cpu.start_streaming(self.files, self.cpu.plan.streaming)
        self._enter(self.cpu)
        return True

    def _enter(self, loaded: LlamaModel) -> None:
        self.loaded = loaded
        self.on_enter(loaded)
        loaded.llama_context().set_threads(self.cpu.n_threads)
        self.prefix_cache_switch.attach(loaded)
        layers = str(loaded.choices["gpu_layers"].value)
        self._note.write(LayersInfo(model=self.files.name, layers=layers))


#: Backends with a device that failed in this process → the failure. A lost device stays lost, and its
#: interrupted backend cannot be used again.
_failed: dict[str, str] = {}


def _is_short_of_memory(error: EngineError) -> bool:
    # not "illegal memory access", after which the device cannot be used
    return bool(re.search(r"alloc|out ?of ?\w*memory", error.message, re.IGNORECASE))


def _leaves_device_usable(error: EngineError) -> bool:
    return _is_short_of_memory(error) or "no kernel image" in error.message


def find_devices(request: OffloadRequest) -> Iterator[tuple[Device, ...]]:
    """Load backends, and yield the devices of each. Afterwards this process cannot be dumped.

    Raises OffloadRefused at the end if there was none.
    """
    files, reasons = backends.available(), []
    for file in files:
        if file.name in _failed:
            reasons.append(f"{file.name} failed before in this process: {_failed[file.name]}")
            continue
        libllama.guard_calls()
        # a library or its driver may crash or hang as it is loaded: it does in another process first,
        # which takes 0.14 s with a software GPU
        tried = backends.ask(file.name)
        answer = tried if isinstance(tried, MissingBackend) else backend_loading.load(file.name, tried)
        if isinstance(answer, LoadedBackend):
            if chosen := request.choose(answer.devices):
                yield chosen
            else:
                reasons.append(f"{file.name} has no device that was requested")
        else:
            reasons.append(f"{answer.name}: {answer.reason}")
            if file.added and not answer.absent:
                _log.warning("an added library is not used: %s: %s", answer.name, answer.reason)
    if len(reasons) == len(files):
        raise OffloadRefused("; ".join(reasons) or "no GPU library was found: see `edgeinfer doctor`")


#: Tokens for warming up a software device, which takes a minute for a whole batch of a 135M model.
_SOFTWARE_TOKENS = 64


@dataclass(slots=True)
class DeviceContext:
    """A model's second load, with layers on devices. llama.cpp may read `placement` until freed."""

    loaded: LlamaModel
    context: LlamaContext
    offload: Offload
    placement: Placement
    backend: str

    def warm_up(self, n_tokens: int) -> None:
        """Compile the kernels for a prompt of `n_tokens` and for one token. Raises DecodeError.

        Kernels depend on the rows: after 64 tokens, a prompt of 512 took 5 s on an H200 with Vulkan.
        """
        batch = Batch.of(self.context, max_outputs=1)
        for n in (min(n_tokens, self.loaded.n_batch), 1):
            batch.clear()
            batch.add([i % self.loaded.vocab.n_vocab for i in range(n)], 0, 0, outputs=1)
            if code := batch.decode(self.context):
                raise libllama.decode_error(code, f"{n} tokens")
            self.context.remove(0)


class OffloadRefused(Exception):
    """No layers can be placed on devices; the message says why."""
