"""Puts a model on devices while the CPU goes on with it, and back on the CPU when they fail.

Where a trial has found so, devices read long prompts alone, and the CPU writes the answers.

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
from dataclasses import replace
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, EngineClosedError, EngineError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.attaching.blocks import EngineBlocks
from edgeinfer.runtime.attaching.reader import DeviceReader
from edgeinfer.runtime.attaching.remembered import TRIALS, Trial, trial_key
from edgeinfer.runtime.attaching.target import NoTarget, Target, load_target, move_state
from edgeinfer.runtime.attaching.trial import Probe
from edgeinfer.runtime.attaching.wishes import Wishes
from edgeinfer.runtime.backends import files as backend_files
from edgeinfer.runtime.backends import loading
from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.backends.devices import Loaded as LoadedBackend
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.decoding.blocks.block_opening import can_cut, make_states, sliding_window
from edgeinfer.runtime.decoding.scheduling.scheduler import Scheduler
from edgeinfer.runtime.loading.load import Loaded, context_params, make_context
from edgeinfer.runtime.loading.lora import LoraAdapters
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.planning.offload import Offload, make_offload
from edgeinfer.runtime.planning.shape import CELL_STEP

_log = logging.getLogger("edgeinfer.gpu")


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
        self._reader: DeviceReader | None = None
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
        if self._reader is not None:
            self._reader.close()
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
        known = TRIALS.read().get(key)
        if known is not None:
            self._refuse_if_no_faster(known)
        target = load_target(
            self._files.paths, self._options, self._cpu, self._lora, devices, rooms, planned
        )
        try:
            probe = Probe(target.active, self._batch(), lambda work: work())
            probe.warm_up()  # here, and not while somebody waits for the next token
            begin = self._go_over
            if key:
                known = known or self._try(target, probe, key)
                self._refuse_if_no_faster(known)
                target.loaded.choices["gpu_layers"] = Chosen(str(target.offload), str(known))
                begin = self._read_there if known.best == "both" else self._go_over
            self._call(lambda: begin(target))
        except BaseException:
            if self._target is None:
                target.loaded.free()
            raise
        if target.failed:
            _log.warning("the devices had room for %s: %s", target.offload, target.failed)

    def _refuse_if_no_faster(self, trial: Trial) -> None:
        if trial.best == "cpu":
            self._cpu.choices["gpu_layers"] = Chosen("none", str(trial))
            raise NoTarget(str(trial))

    def _trial_key(self, planned: Offload, devices: tuple[Device, ...]) -> str:
        model = self._files.sha256 or "\0".join(self._files.paths)
        return trial_key(model, devices, str(loading.this_build()), planned)

    def _try(self, target: Target, probe: Probe, key: str) -> Trial:
        """Measure both sides, the CPU's between the steps of whoever asks, in a small context of its
        own.
        """
        options = msgspec.structs.replace(self._options, kv_type=self._cpu.plan.kv_type.value)
        n_cells, n_batch = 2 * CELL_STEP, min(CELL_STEP, self._cpu.n_batch)
        params = context_params(options, n_cells, n_batch, 1, self._cpu.n_threads)
        params.n_outputs_max = 1
        context, _ = make_context(self._cpu.model, params)
        try:
            active = ActiveContext(context, libllama.L.llama_get_memory(context))
            own = Probe(active, self._batch(), self._call)
            cpu, devices = own.measure(), probe.measure()
            both = probe.with_answers_of(own, devices, cpu) if self._can_read_there() else None
        finally:
            libllama.L.llama_free(context)
        place = str(target.offload)
        found = Trial(
            model=self._files.name, place=place, cpu=cpu, devices=devices, both=both, at=time.time()
        )
        TRIALS.put(key, found)
        return found

    def _can_read_there(self) -> bool:
        """Whether what a device has computed can be moved here piece by piece: cells behind a sliding
        window are given away, and a state that cannot be cut has no pieces.
        """
        return can_cut(self._cpu) and not sliding_window(self._cpu)

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
        self._mark_cells()
        self._scheduler.on_failed_step = self._failed
        self._target = target
        libllama.L.llama_memory_clear(self._cpu.memory, False)
        self._cpu.cells.give_back()
        self._enter(target.loaded)

    def _read_there(self, target: Target) -> None:
        """Between two steps: have `target` read long prompts from now on, and decode here as before."""
        if self._is_closing:
            raise EngineClosedError("the engine is closed")
        self._blocks.leave()
        self._mark_cells()
        batch = Batch(
            capacity=target.loaded.n_batch,
            max_outputs=1,
            n_vocab=self._cpu.vocab.n_vocab,
            n_seq_max=1,
            n_cells=self._cpu.n_cells,
        )
        here, there = make_states(self._cpu, self._active), make_states(target.loaded, target.active)
        self._reader = DeviceReader(target, batch, here, there)
        readings = self._scheduler.prefixes.readings
        readings.reader, readings.on_lost = self._reader, self._reader_failed
        self._target = target
        found = target.loaded.choices["gpu_layers"]
        choices = self._cpu.choices | {
            "gpu_layers": Chosen(f"for prompts: {found.value}", found.reason)
        }
        self._enter(replace(self._cpu, choices=choices))

    def _reader_failed(self, failure: str) -> None:
        """Devices that read prompts failed: the CPU reads them. What is on them is left there."""
        target, self._target = self._target, None
        self._reader = None
        if target is None:
            return
        names = self._note_failure(target, failure)
        _log.warning("%s failed, and the CPU reads prompts: %s", names, failure)
        self._blocks.leave()
        self._mark_cells()
        self._enter(self._cpu)

    def _mark_cells(self) -> None:
        """What is in the cells was computed elsewhere, or otherwise: no block of what comes now."""
        for resident in self._scheduler.kv.residents:
            resident.is_shifted = True

    def _note_failure(self, target: Target, failure: str) -> str:
        """The names of the devices that failed."""
        names = " and ".join(part.device for part in target.offload.parts)
        self._cpu.choices["gpu_layers"] = Chosen("none", f"{names} failed: {failure}")
        return names

    def _failed(self, error: DecodeError) -> bool:
        """A step failed on a device: the CPU goes on. What is on the device is left there, because a
        lost one may never answer.
        """
        target, self._target = self._target, None
        if target is None:
            return False
        names = self._note_failure(target, error.message)
        _log.warning("%s failed, and the CPU goes on: %s", names, error.message)
        self._blocks.leave()
        active = ActiveContext(self._cpu.context, self._cpu.memory, self._cpu.cells)
        active.adapters = self._lora.leave()
        self._scheduler.go_over(active, knows=False, on_device=False)
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
        libllama.guard_decode()
        answer = loading.load(file.name)
        if isinstance(answer, LoadedBackend):
            if chosen := wishes.chosen(answer.devices):
                return chosen
            reasons.append(f"{file.name} has no such device")
        else:
            reasons.append(f"{answer.name}: {answer.reason}")
    raise NoTarget(
        "; ".join(reasons) or "there is no library for one: `edgeinfer backend` says where it goes"
    )
