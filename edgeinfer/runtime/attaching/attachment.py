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
from collections.abc import Callable
from typing import Any

from edgeinfer.blocks.store import BlockStore
from edgeinfer.errors import DecodeError, EngineClosedError, EngineError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.attaching.target import NoTarget, Target, load_target, move_state
from edgeinfer.runtime.backends import files as backend_files
from edgeinfer.runtime.backends import loading
from edgeinfer.runtime.backends.devices import Device, Wishes
from edgeinfer.runtime.backends.devices import Loaded as LoadedBackend
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.blocks.block_cache import BlockCache
from edgeinfer.runtime.decoding.blocks.block_opening import open_blocks
from edgeinfer.runtime.decoding.scheduling.scheduler import Scheduler
from edgeinfer.runtime.loading.load import Loaded
from edgeinfer.runtime.loading.lora import LoraAdapters
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.planning.offload import make_offload

_log = logging.getLogger("edgeinfer.gpu")
#: The end of an engine waits so long (seconds) for what was computed to be on the disk.
FLUSH_S = 30.0


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
        """Wait until devices are attached, or none will be; False when it takes longer."""
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
            self._cpu.choices["gpu_layers"] = Chosen("none", str(error))
            if wishes.is_explicit:
                _log.warning("no layers on a GPU: %s", error)
        except EngineError as error:
            if not self._is_closing:
                _log.warning("no layers on a GPU: %s", error.message)

    def _attach(self, wishes: Wishes) -> None:
        devices = find_devices(wishes)
        rooms = tuple(wishes.room(device) for device in devices)
        planned = make_offload(self._cpu.shape, self._cpu.plan, rooms, wishes.layers)
        target = load_target(
            self._files.paths, self._options, self._cpu, self._lora, devices, rooms, planned
        )
        try:
            target.warm_up()  # here, and not while somebody waits for the next token
            self._call(lambda: self._go_over(target))
        except BaseException:
            if self._target is None:
                target.loaded.free()
            raise
        if target.failed:
            _log.warning("the devices had room for %s: %s", target.offload, target.failed)

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

    def _mark_cells(self) -> None:
        """What is in the cells was computed elsewhere, or otherwise: no block of what comes now."""
        for resident in self._scheduler.kv.residents:
            resident.is_shifted = True

    def _note_failure(self, target: Target, failure: str) -> str:
        names = " and ".join(part.device for part in target.offload.parts)
        self._cpu.choices["gpu_layers"] = Chosen("none", f"{names} failed: {failure}")
        return names

    def _failed(self, error: DecodeError) -> bool:
        """The CPU goes on; what is on the device is left: a lost one may never answer."""
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
    """Load backends and choose devices; this process cannot be dumped then. Raises NoTarget."""
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


class EngineBlocks:
    """Opens and closes the blocks of what `scheduler` decodes with."""

    def __init__(
        self, files: ModelFiles, options: LoadOptions, active: ActiveContext, scheduler: Scheduler
    ) -> None:
        self._files, self._options = files, options
        self._active = active
        self._prefixes, self._roster = scheduler.prefixes, scheduler.roster
        self._kv = scheduler.kv
        self._store: BlockStore | None = None
        self._left: list[threading.Thread] = []

    @property
    def cache(self) -> BlockCache | None:
        """What is open."""
        return self._prefixes.blocks

    def open(self, store: BlockStore, loaded: Loaded, checked: str) -> None:
        """Use `store`. `checked` is what the check of this model has found. Raises OSError."""
        self._store = store
        self._prefixes.blocks = open_blocks(
            store, self._files, self._options, loaded, self._active, self._kv, checked
        )

    def leave(self) -> None:
        """Use no blocks until `enter`. Between two steps; what is written goes on being written."""
        blocks = self._prefixes.leave_store(self._roster.running)
        if blocks is not None:
            thread = threading.Thread(target=blocks.blocks.close, args=(FLUSH_S,), daemon=True)
            thread.start()
            self._left.append(thread)

    def enter(self, loaded: Loaded) -> None:
        """Use the blocks of what `loaded` computes, where a store is used at all. Between two steps."""
        if self._store is not None:
            self.open(self._store, loaded, "")

    def close(self) -> None:
        """Write what waits, and use no store any more."""
        blocks, self._prefixes.blocks = self.cache, None
        self._store = None
        if blocks is not None:
            blocks.close(FLUSH_S)
        while self._left:
            self._left.pop().join(FLUSH_S)
