"""Puts a model on devices while the CPU goes on with it, and back on the CPU when they fail.

The model stays loaded for the CPU: its weights are mapped from files, and take no memory that others
need. A thread loads it once more with layers on devices. Between two steps the engine goes over: what
was computed moves along, and the pages of the CPU's KV cache are given back. After a failed step the
CPU's context goes on, and what running requests had is found in the store or computed again; their
streams do not end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, EngineClosedError, EngineError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.attaching.blocks import EngineBlocks
from edgeinfer.runtime.attaching.remembered import Rates, Trial, remember, remembered, trial_key
from edgeinfer.runtime.attaching.target import NoTarget, Target, load_target, move_state
from edgeinfer.runtime.attaching.trial import Probe
from edgeinfer.runtime.attaching.wishes import Wishes
from edgeinfer.runtime.backends import files as backend_files
from edgeinfer.runtime.backends import loading
from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.backends.devices import Loaded as LoadedBackend
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.decoding.scheduling.idle_cells import pieces
from edgeinfer.runtime.decoding.scheduling.scheduler import Scheduler
from edgeinfer.runtime.loading.load import Loaded, context_params, make_context
from edgeinfer.runtime.loading.lora import LoraAdapters
from edgeinfer.runtime.loading.mappings import DONTNEED, advise
from edgeinfer.runtime.offload import Offload, make_offload
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.shape import CELL_STEP

_log = logging.getLogger("edgeinfer.gpu")
#: Beside the backend libraries that came with the program; its source is tools/guard.cpp.
GUARD = "libedgeinfer-guard.so.1"


class Attachment:
    """Devices of one engine. `cpu` is the model as it was loaded, `active` the context that decodes.

    `call` runs work between two steps, `blocks` are the engine's, and `loaded` what it computes with.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: LoadOptions,
        cpu: Loaded,
        active: ActiveContext,
        lora: LoraAdapters,
        scheduler: Scheduler,
        call: Callable[[Callable[[], Any]], Any],
        blocks: EngineBlocks,
    ) -> None:
        self._files, self._options = files, options
        self._cpu = cpu
        self._active = active
        self._lora = lora
        self._scheduler = scheduler
        self._call, self._blocks = call, blocks
        self._target: Target | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self.loaded = cpu

    def begin(self, wishes: Wishes) -> None:
        """Attach what `wishes` say, in the background. What keeps it from working is logged once.

        Nothing is opened where nobody asked for layers and there is no GPU.
        """
        if self._thread is None and wishes.is_worth_asking():
            self._thread = threading.Thread(
                target=self._main, args=(wishes,), name="edgeinfer-attach", daemon=True
            )
            self._thread.start()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until devices are attached, or it is known that none will be; False when it takes
        longer.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def close(self) -> None:
        """End attaching, and free what is attached. When nothing decodes any more."""
        self._is_closing = True
        self.settle()
        if self._target is not None:
            self._target.loaded.free()
            self._target = None

    def _main(self, wishes: Wishes) -> None:
        try:
            self._attach(wishes)
        except NoTarget as error:
            if wishes.is_explicit:
                _log.warning("no layers on a GPU: %s", error)
        except EngineError as error:
            if not self._is_closing:
                _log.warning("no layers on a GPU: %s", error.message)

    def _attach(self, wishes: Wishes) -> None:
        devices = find_devices(wishes)
        rooms = tuple(wishes.room(device) for device in devices)
        planned = make_offload(self._cpu.shape, self._cpu.plan, rooms, wishes.layers)
        key = self._trial_key(planned, devices) if wishes.layers == "auto" else ""
        known = remembered().get(key)
        if known is not None:
            self._refuse_if_lost(known)
        target = load_target(
            self._files.paths, self._options, self._cpu, self._lora, devices, rooms, planned
        )
        try:
            probe = Probe(target.active, self._batch(), lambda work: work())
            probe.warm_up()  # here, and not while somebody waits for the next token
            if key:
                known = known or self._try(target, probe, key)
                self._refuse_if_lost(known)
                target.loaded.choices["gpu_layers"] = Chosen(str(target.offload), str(known))
            self._call(lambda: self._go_over(target))
        except BaseException:
            if self._target is None:
                target.loaded.free()
            raise
        if target.failed:
            _log.warning("the devices had room for %s: %s", target.offload, target.failed)

    def _refuse_if_lost(self, trial: Trial) -> None:
        if not trial.is_won:
            self._cpu.choices["gpu_layers"] = Chosen("none", str(trial))
            raise NoTarget(str(trial))

    def _trial_key(self, planned: Offload, devices: tuple[Device, ...]) -> str:
        model = self._files.sha256 or "\0".join(self._files.paths)
        return trial_key(model, devices, str(loading.this_build()), planned)

    def _try(self, target: Target, probe: Probe, key: str) -> Trial:
        found = Trial(
            model=self._files.name,
            place=str(target.offload),
            cpu=self._cpus_rates(),
            devices=probe.measure(),
            at=time.time(),
        )
        remember(key, found)
        return found

    def _cpus_rates(self) -> Rates:
        """Measured between the steps of whoever asks meanwhile, in a small context of its own."""
        options = msgspec.structs.replace(self._options, kv_type=self._cpu.plan.kv_type.value)
        n_cells, n_batch = 2 * CELL_STEP, min(CELL_STEP, self._cpu.n_batch)
        params = context_params(options, n_cells, n_batch, 1, self._cpu.n_threads)
        params.n_outputs_max = 1
        context, _ = make_context(self._cpu.model, params)
        try:
            active = ActiveContext(context, libllama.L.llama_get_memory(context))
            return Probe(active, self._batch(), self._call).measure()
        finally:
            libllama.L.llama_free(context)

    def _batch(self) -> Batch:
        return Batch(
            capacity=min(CELL_STEP, self._cpu.n_batch),
            max_outputs=1,
            n_vocab=self._cpu.vocab.n_vocab,
            n_seq_max=1,
            n_cells=2 * CELL_STEP,
        )

    def _go_over(self, target: Target) -> None:
        """Between two steps: decode with `target` from now on."""
        if self._is_closing:
            raise EngineClosedError("the engine is closed")
        self._lora.enter(target.loaded.model, target.active.adapters)
        self._blocks.leave()
        knows = move_state(self._active, target.active)
        self._scheduler.go_over(target.active, knows=knows, on_device=True)
        for resident in self._scheduler.kv.residents:
            resident.is_shifted = True  # not computed where it is: no block of this context's
        self._scheduler.on_failed_step = self._failed
        self._target = target
        libllama.L.llama_memory_clear(self._cpu.memory, False)
        advise(pieces(self._cpu.cells), DONTNEED)
        self._enter(target.loaded)

    def _failed(self, error: DecodeError) -> bool:
        """A step failed on a device: the CPU goes on. What is on the device is left there, because a
        lost one may never answer.
        """
        target, self._target = self._target, None
        if target is None:
            return False
        names = " and ".join(part.device for part in target.offload.parts)
        _log.warning("%s failed, and the CPU goes on: %s", names, error.message)
        self._blocks.leave()
        active = ActiveContext(self._cpu.context, self._cpu.memory, self._cpu.cells)
        active.adapters = self._lora.leave()
        self._scheduler.go_over(active, knows=False, on_device=False)
        self._cpu.choices["gpu_layers"] = Chosen("none", f"{names} failed: {error.message}")
        self._enter(self._cpu)
        return True

    def _enter(self, loaded: Loaded) -> None:
        self.loaded = loaded
        libllama.L.llama_set_n_threads(loaded.context, self._cpu.n_threads, self._cpu.n_threads)
        self._blocks.enter(loaded)


def find_devices(wishes: Wishes) -> tuple[Device, ...]:
    """Load the backend libraries that are here, and choose devices. Raises NoTarget.

    A process that has called this cannot be dumped any more.
    """
    reasons = []
    for file in backend_files.available():
        libllama.guard_decode(backend_files.shipped_dir() / GUARD)
        answer = loading.load(file.name)
        if isinstance(answer, LoadedBackend):
            if chosen := wishes.chosen(answer.devices):
                return chosen
            reasons.append(f"{file.name} has no such device")
        else:
            reasons.append(f"{answer.name}: {answer.reason}")
    raise NoTarget("; ".join(reasons) or "no library for one is here: `edgeinfer backend add`")
