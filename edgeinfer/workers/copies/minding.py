"""Starts, replaces and ends the copies of a model, by what is asked of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edgeinfer.errors import EdgeInferError, OutOfMemoryError
from edgeinfer.runtime.options import CopiesInfo, CopyInfo, EngineInfo
from edgeinfer.system.machine import read_memory
from edgeinfer.units import format_bytes
from edgeinfer.workers.copies.copies_engine import CopiesEngine, Copy
from edgeinfer.workers.copies.growth import Bounds, Growth, Seen

#: Seconds between two looks at what waits.
_LOOK_S = 0.25
#: Pauses (seconds) before a copy is started again, by how many starts or copies failed in a row.
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A copy that ends after this long was a healthy one: its end is the first again.
_HEALTHY_S = 60.0
#: Left free for the page cache and everybody else.
_RESERVE_BYTES = 512 << 20

#: Starts a copy with so many threads, like the first one if that is given. Raises what loading raises.
StartCopy = Callable[[EngineInfo | None, int], Copy]


class Minder:
    """Minds an engine's copies from a thread, which tells `on_change` of each new number and why."""

    def __init__(
        self,
        start: StartCopy,
        bounds: Bounds,
        cores: int,
        on_change: Callable[[CopiesInfo], None] = lambda info: None,
    ) -> None:
        """Start the first copy. Raises what that raises."""
        self._start_copy = start
        self._bounds = bounds
        self._on_change = on_change
        first = start(None, cores)
        self._info = first.engine.info
        self._growth = Growth(bounds, cores)
        self._soon = threading.Event()
        self._is_closed = False
        self._failures = 0
        self._failed_at = 0.0
        self._told: tuple[int, str] = (0, "")
        self.engine = CopiesEngine(self._info)
        self.engine.describe = self._described
        self.engine.on_death = self._soon.set
        self.engine.on_close = self._close
        self.engine.add(first)
        self._thread = threading.Thread(target=self._mind, name="copies", daemon=True)
        self._thread.start()

    def _described(self, running: tuple[CopyInfo, ...]) -> CopiesInfo:
        return CopiesInfo(
            model=self._info.model,
            least=self._bounds.least,
            most=self._bounds.most,
            running=running,
            reason=self._growth.reason,
            crashed_total=self.engine.crashed_total,
        )

    def _close(self) -> None:
        self._is_closed = True
        self._soon.set()
        self._thread.join()
        self._growth.reason = "the model is not loaded"
        self._on_change(self._described(()))

    def _mind(self) -> None:
        self._tell()
        while not self._is_closed:
            self._soon.wait(_LOOK_S)
            self._soon.clear()
            if not self._is_closed:
                self._look()

    def _look(self) -> None:
        if died := self.engine.bury():
            self._failed(died)
            self._growth.reason = "a copy's process has ended, and another takes its place"
            self._changed()
        if self.engine.is_shrinking:
            self._growth.changed()
        usable = self.engine.usable
        n = len(usable)
        if n < self._bounds.least:
            self._more()
            return
        step = self._growth.look(self._seen(n))
        if step == "grow":
            self._more()
        elif step == "shrink":
            self.engine.retire(usable[-1])
            self._changed()

    def _seen(self, n: int) -> Seen:
        engine, now = self.engine, time.monotonic()
        waiting = engine.waiting
        return Seen(
            now=now,
            copies=n,
            waiting=len(waiting),
            oldest_s=max((now - ticket.since for ticket in waiting), default=0.0),
            inside=sum(copy.inside for copy in engine.usable),
            slots=self._info.n_parallel,
        )

    # --- another number of copies

    def _more(self) -> None:
        """Start one more. Without any that runs, a failure is the end of the engine."""
        if self._pauses():
            return
        n = len(self.engine.usable) + 1
        try:
            self._refuse_without_memory(n)
            self._add(self._start_copy(self._info, self._share(n - 1, n)))
        except EdgeInferError as error:
            self._failed(1)
            self._growth.reason = f"another could not be started: {error.message}"
            if not self.engine.usable:
                self.engine.give_up()
                self._is_closed = True
        self._changed()

    def _add(self, copy: Copy) -> None:
        try:
            self.engine.add(copy)
        except EdgeInferError:
            copy.engine.close()
            raise

    def _refuse_without_memory(self, n: int) -> None:
        if n <= self._bounds.least:
            return
        kv_bytes = self._info.least_kv_bytes or self._info.kv_bytes
        need = kv_bytes + self._info.compute_bytes + _RESERVE_BYTES
        memory = read_memory()
        if memory.available_bytes < need:
            raise OutOfMemoryError(
                f"it takes {format_bytes(need)}, and {format_bytes(memory.available_bytes)} are free"
            )

    def _failed(self, n: int) -> None:
        now = time.monotonic()
        self._failures = n if now - self._failed_at > _HEALTHY_S else self._failures + n
        self._failed_at = now

    def _pauses(self) -> bool:
        pause_s = _PAUSES_S[min(max(self._failures - 1, 0), len(_PAUSES_S) - 1)]
        return self._failures > 0 and time.monotonic() - self._failed_at < pause_s

    def _changed(self) -> None:
        """Share the cores among those that run, and tell."""
        usable = self.engine.usable
        for at, copy in enumerate(usable):
            n_threads = self._share(at, len(usable))
            if n_threads != copy.n_threads:
                copy.n_threads = n_threads
                try:
                    copy.engine.use_threads(n_threads)
                except EdgeInferError:  # it has ended just now
                    continue
        self._growth.changed()
        self._tell()

    def _share(self, at: int, n: int) -> int:
        return max(1, self._growth.cores // n + (at < self._growth.cores % n))

    def _tell(self) -> None:
        info = self.engine.copies()
        now = len(info.running), info.reason
        if now != self._told:
            self._told = now
            self._on_change(info)


def start(
    start_copy: StartCopy, bounds: Bounds, cores: int, on_change: Callable[[CopiesInfo], None]
) -> CopiesEngine:
    """Make the engine with its first copy; the others follow. Raises what loading raises."""
    return Minder(start_copy, bounds, cores, on_change).engine
