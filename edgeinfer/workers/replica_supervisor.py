"""Starts, replaces and ends the replicas of a model, by how long requests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from edgeinfer.errors import EdgeInferError, OutOfMemoryError
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.options import EngineInfo, ReplicaInfo, ReplicasInfo
from edgeinfer.units import format_bytes
from edgeinfer.workers.replicas import Replica, ReplicatedEngine

#: Interval (s) between two looks at the waiting requests.
_LOOK_S = 0.25
#: Pauses (s) before a replica is started again, by how many starts or replicas failed in a row.
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A replica that ran for this long (s) was healthy: its end counts as a first failure.
_HEALTHY_S = 60.0
#: Memory left free for the page cache and other programs.
_RESERVE_BYTES = 512 << 20

#: Starts a replica with so many threads, like the first one if given. Raises as loading does.
StartReplica = Callable[[EngineInfo | None, int], Replica]

Step = Literal["grow", "shrink", "stay"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`least` to `most` replicas.

    One more if a request has waited longer than `wait_s`, one less if fewer were enough for `idle_s`.
    """

    least: int
    most: int
    wait_s: float = 5.0
    idle_s: float = 60.0


@dataclass
class Autoscaling:
    """Chooses the number of replicas, with its reason. `cores` are shared: each has one at least."""

    bounds: Bounds
    cores: int
    reason: str = "the least that may run"
    _idle_since: float | None = None

    def changed(self) -> None:
        """Start observing again after the number of replicas changed."""
        self._idle_since = None

    def step(self, now: float, *, replicas: int, oldest_wait_s: float, load: int, slots: int) -> Step:
        """Decide at time `now` (s).

        `oldest_wait_s` is 0 if no request waits; `load` counts all requests, `slots` the sequences that
        one replica decodes at once.
        """
        if oldest_wait_s > self.bounds.wait_s:
            return self._when_waiting(replicas)
        fewer_slots = (replicas - 1) * slots
        if replicas <= self.bounds.least or oldest_wait_s or load > fewer_slots:
            self._idle_since = None
            return "stay"
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since < self.bounds.idle_s:
            return "stay"
        self.reason = f"{replicas - 1} were enough for {self.bounds.idle_s:g} s"
        return "shrink"

    def _when_waiting(self, replicas: int) -> Step:
        self._idle_since = None
        if replicas >= self.bounds.most:
            self.reason = "the most that may run"
        elif replicas >= self.cores:
            self.reason = "each has one core"
        else:
            self.reason = f"requests waited longer than {self.bounds.wait_s:g} s"
            return "grow"
        return "stay"


class ReplicaSupervisor:
    """Supervises an engine's replicas from a thread, which reports each new number to `on_change`."""

    def __init__(
        self,
        start: StartReplica,
        bounds: Bounds,
        cores: int,
        on_change: Callable[[ReplicasInfo], None] = lambda info: None,
    ) -> None:
        """Start the first replica; the others follow. Raises what loading raises."""
        self._start_replica = start
        self._bounds = bounds
        self._on_change = on_change
        first = start(None, cores)
        self._info = first.engine.info
        self._autoscaling = Autoscaling(bounds, cores)
        self._soon = threading.Event()
        self._is_closed = False
        self._failures = 0
        self._failed_at = 0.0
        self._reported: tuple[int, str] = (0, "")
        self.engine = ReplicatedEngine(self._info)
        self.engine.describe = self._described
        self.engine.on_death = self._soon.set
        self.engine.on_close = self._close
        self.engine.add(first)
        self._thread = threading.Thread(target=self._supervise, name="replicas", daemon=True)
        self._thread.start()

    def _described(self, running: tuple[ReplicaInfo, ...]) -> ReplicasInfo:
        return ReplicasInfo(
            model=self._info.model,
            least=self._bounds.least,
            most=self._bounds.most,
            running=running,
            reason=self._autoscaling.reason,
            crashed_total=self.engine.crashed_total,
        )

    def _close(self) -> None:
        self._is_closed = True
        self._soon.set()
        self._thread.join()
        self._autoscaling.reason = "the model is not loaded"
        self._on_change(self._described(()))

    def _supervise(self) -> None:
        self._report()
        while not self._is_closed:
            self._soon.wait(_LOOK_S)
            self._soon.clear()
            if not self._is_closed:
                self._look()

    def _look(self) -> None:
        if died := self.engine.reap():
            self._count_failures(died)
            self._autoscaling.reason = "a replica's process has ended, and another takes its place"
            self._changed()
        if self.engine.is_draining:
            self._autoscaling.changed()
        usable = self.engine.usable
        if len(usable) < self._bounds.least:
            self._grow()
            return
        now = time.monotonic()
        step = self._autoscaling.step(
            now,
            replicas=len(usable),
            oldest_wait_s=max((now - one.since for one in self.engine.waiting), default=0.0),
            load=sum(replica.load for replica in usable),
            slots=self._info.n_parallel,
        )
        if step == "grow":
            self._grow()
        elif step == "shrink":
            self.engine.drain(usable[-1])
            self._changed()

    # --- another number of replicas

    def _grow(self) -> None:
        """Start one more. If none runs, a failure ends the engine."""
        if self._is_pausing():
            return
        n = len(self.engine.usable) + 1
        try:
            self._refuse_without_memory(n)
            replica = self._start_replica(self._info, self._share(n - 1, n))
            try:
                self.engine.add(replica)
            except EdgeInferError:
                replica.engine.close()
                raise
        except EdgeInferError as error:
            self._count_failures(1)
            self._autoscaling.reason = f"another could not be started: {error.message}"
            if not self.engine.usable:
                self.engine.give_up()
                self._is_closed = True
        self._changed()

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

    def _count_failures(self, n: int) -> None:
        now = time.monotonic()
        self._failures = n if now - self._failed_at > _HEALTHY_S else self._failures + n
        self._failed_at = now

    def _is_pausing(self) -> bool:
        pause_s = _PAUSES_S[min(max(self._failures - 1, 0), len(_PAUSES_S) - 1)]
        return self._failures > 0 and time.monotonic() - self._failed_at < pause_s

    def _changed(self) -> None:
        """Share the cores among the usable replicas, and report."""
        usable = self.engine.usable
        for at, replica in enumerate(usable):
            n_threads = self._share(at, len(usable))
            if n_threads != replica.n_threads:
                replica.n_threads = n_threads
                try:
                    replica.engine.use_threads(n_threads)
                except EdgeInferError:  # it has ended just now
                    continue
        self._autoscaling.changed()
        self._report()

    def _share(self, at: int, n: int) -> int:
        cores = self._autoscaling.cores
        return max(1, cores // n + (at < cores % n))

    def _report(self) -> None:
        info = self.engine.replicas()
        now = len(info.running), info.reason
        if now != self._reported:
            self._reported = now
            self._on_change(info)
