"""Start the replicas of a model, and replace those whose process has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.options import EngineInfo, ReplicaInfo, ReplicasInfo
from edgeinfer.workers.replicas import Replica, ReplicatedEngine

#: Interval (s) at which the supervisor looks for ended replicas. Their requests fail at once.
_CHECK_S = 0.25
#: Pause (s) before a replica is started again, after the 1st, 2nd, … failure in a row.
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
#: After this time (s) without a failure, the next failure counts as the 1st.
_HEALTHY_S = 60.0

#: Starts a replica with a number of threads (2nd argument). The 1st argument is the EngineInfo of the
#: first replica, whose options all replicas have; None for the first one. Raises the errors of loading.
StartReplica = Callable[[EngineInfo | None, int], Replica]


class ReplicaSupervisor:
    """Keeps `count` replicas of a model running in `engine`, and divides `cores` CPU cores among them.

    The supervisor's thread calls `on_change` when the number of running replicas changes, or the reason
    for that number (`ReplicasInfo.reason`).
    """

    def __init__(
        self,
        start: StartReplica,
        count: int,
        cores: int,
        on_change: Callable[[ReplicasInfo], None] = lambda info: None,
    ) -> None:
        """Start the first replica, then the others in a thread. Raises what loading raises."""
        self._start_replica = start
        self._count = count
        self._cores = cores
        self._on_change = on_change
        first = start(None, cores)
        self._info = first.engine.info
        self._reason = "as configured"
        self._wake = threading.Event()
        self._is_closed = False
        self._failures = 0
        self._failed_at = 0.0
        self._reported: tuple[int, str] = (0, "")
        self.engine = ReplicatedEngine(self._info)
        self.engine.describe = self._describe
        self.engine.on_death = self._wake.set
        self.engine.on_close = self._close
        self.engine.add(first)
        self._thread = threading.Thread(target=self._supervise, name="replicas", daemon=True)
        self._thread.start()

    def _describe(self, running: tuple[ReplicaInfo, ...]) -> ReplicasInfo:
        return ReplicasInfo(
            model=self._info.model,
            count=self._count,
            running=running,
            reason=self._reason,
            crashed_total=self.engine.crashed_total,
        )

    def _close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._reason = "the model is not loaded"
        self._on_change(self._describe(()))

    def _supervise(self) -> None:
        self._report()
        while not self._is_closed:
            if n_dead := self.engine.reap():
                self._count_failures(n_dead)
                self._reason = "a replica's process has ended; another one replaces it"
                self._share_cores()
            if len(self.engine.usable) < self._count and not self._is_pausing():
                self._start()
            if self._is_closed:
                return
            self._wake.wait(_CHECK_S)
            self._wake.clear()

    def _start(self) -> None:
        """Start one more replica. If that fails and no other replica runs, close the engine."""
        n = len(self.engine.usable) + 1
        try:
            replica = self._start_replica(self._info, self._share(n - 1, n))
            try:
                self.engine.add(replica)
            except EdgeInferError:
                replica.engine.close()
                raise
        except EdgeInferError as error:
            self._count_failures(1)
            self._reason = f"another replica could not be started: {error.message}"
            if not self.engine.usable:
                self.engine.give_up()
                self._is_closed = True
        else:
            if n == self._count:
                self._reason = "as configured"
        self._share_cores()

    def _count_failures(self, n: int) -> None:
        now = time.monotonic()
        self._failures = n if now - self._failed_at > _HEALTHY_S else self._failures + n
        self._failed_at = now

    def _is_pausing(self) -> bool:
        pause_s = _PAUSES_S[min(max(self._failures - 1, 0), len(_PAUSES_S) - 1)]
        return self._failures > 0 and time.monotonic() - self._failed_at < pause_s

    def _share_cores(self) -> None:
        """Divide the cores between the running replicas, and call `on_change` if needed."""
        usable = self.engine.usable
        for index, replica in enumerate(usable):
            n_threads = self._share(index, len(usable))
            if n_threads != replica.n_threads:
                replica.n_threads = n_threads
                try:
                    replica.engine.use_threads(n_threads)
                except EdgeInferError:  # this replica has just ended
                    continue
        self._report()

    def _share(self, index: int, n: int) -> int:
        return max(1, self._cores // n + (index < self._cores % n))

    def _report(self) -> None:
        info = self.engine.replicas()
        now = len(info.running), info.reason
        if now != self._reported:
            self._reported = now
            self._on_change(info)
