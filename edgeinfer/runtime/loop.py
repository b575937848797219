"""The decode thread: the only thread that uses the llama.cpp context. The first request starts it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from edgeinfer.errors import DecodeError, EngineClosedError, EngineError, QueueFullError
from edgeinfer.runtime.scheduler.engine_core import EngineCore
from edgeinfer.runtime.scheduler.sequence import Sequence

T = TypeVar("T")
_log = logging.getLogger("edgeinfer.engine")

#: An idle engine waits this long (s) for further requests, so that a burst starts in one batch.
_BURST_S = 0.0005
_MAX_BURST = 64


class DecodeLoop:
    """Runs the steps of `core` on the decode thread. At most `capacity` requests may run or wait."""

    def __init__(self, core: EngineCore, *, capacity: int) -> None:
        self._core, self._capacity = core, capacity
        self._queue = core.queue
        self._inbox: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._n_submitted = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        #: The error that ended the decode thread, "" if there was none.
        self.failure = ""

    @property
    def n_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._n_submitted - self._queue.n_ended

    def submit(self, seq: Sequence) -> None:
        """Queue a request. Raises QueueFullError, EngineClosedError."""
        with self._changed:
            self._check_open()
            if self.n_requests >= self._capacity:
                raise QueueFullError(f"the queue is full: {self.n_requests} requests run or wait")
            self._n_submitted += 1
            seq.wake_loop = self.wake
            self._inbox.put(seq)
            self._wake_thread()
        if not seq.is_prefill_only:
            self._core.executor.cancellation.abort_for_incoming_request(len(seq.tokens))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the decode thread between two steps; return its result or raise its error."""
        done: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._jobs.put((work, done))
            self._wake_thread()
        return done.result()

    def wake(self) -> None:
        """Wake the loop to end cancelled requests; abort a running prefill if all its requests are."""
        self._core.executor.cancellation.abort_if_all_cancelled()
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """End the decode thread; the next `submit` or `call` starts a new one.

        Raises EngineError while requests run or wait.
        """
        with self._changed:
            if self.n_requests:
                problem = f"the engine cannot stop: {self.n_requests} requests run or wait"
                raise EngineError(problem, hint="wait until they have ended, then try again")
            self._stopping = True
        self._join()
        self._stopping = False

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel all requests, abort the running step and end the thread for good. Idempotent.

        Do not call it on the decode thread. If `timeout_s` has passed, that thread may still compute.
        """
        with self._changed:
            self._closed = True
        self._core.executor.abort_all()
        self._join(timeout_s)

    def _join(self, timeout_s: float | None = None) -> None:
        with self._changed:
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)
        if thread is None or not thread.is_alive():
            self._core.executor.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.failure:
            raise self._failure_error()

    def _failure_error(self) -> EngineClosedError:
        return EngineClosedError(self.failure, hint="repeat the request: the model is loaded again")

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="edgeinfer-decode", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _main(self) -> None:
        try:
            self._run_until_stopped()
        except BaseException as error:  # noqa: BLE001  every caller gets the error
            self._fail_everything(error)

    def _fail_everything(self, error: BaseException) -> None:
        with self._changed:
            self.failure = f"the decode loop failed: {type(error).__name__}: {error}"
            self._thread = None
            self._n_submitted = self._queue.n_ended
            sequences = [*self._queue.running, *self._queue.waiting]
            while not self._inbox.empty():
                sequences.append(self._inbox.get())
        _log.error("%s", self.failure)
        for seq in sequences:
            with contextlib.suppress(Exception):
                seq.end(self._failure_error())
        while not self._jobs.empty():
            self._jobs.get()[1].set_exception(self._failure_error())

    def _run_until_stopped(self) -> None:
        while self._wait_for_work():
            self._run_jobs()
            if self._queue.is_empty:
                self._wait_for_burst()
            self._drain_inbox()
            if not self._queue.is_empty:
                self._run_guarded(self._core.step)
            elif self._jobs.empty():
                self._run_guarded(self._core.do_idle_work)

    def _wait_for_work(self) -> bool:
        """Wait for work; return False if there is none and the thread must end."""
        with self._changed:
            while not (self._has_work() or self._stopping or self._closed):
                self._changed.wait(self._core.idle_work_due_in_s())
            if self._closed:
                self._drain_inbox()
                for seq in [*self._queue.running, *self._queue.waiting]:
                    seq.cancelled = True
            if not self._has_work():
                self._thread = None  # under the lock, so that the next caller starts a new thread
                return False
            return True

    def _has_work(self) -> bool:
        is_idle = self._queue.is_empty and self._inbox.empty() and self._jobs.empty()
        return not is_idle or self._core.idle_work_due_in_s() == 0.0

    def _wait_for_burst(self) -> None:
        """Wait until no further request arrives: 8 streams that start one by one are 2 % slower."""
        n_before = 0
        while n_before < self._inbox.qsize() < _MAX_BURST:
            n_before = self._inbox.qsize()
            time.sleep(_BURST_S)

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._queue.add(self._inbox.get())

    def _run_jobs(self) -> None:
        for _ in range(self._jobs.qsize()):  # jobs added during this loop run after new requests
            work, done = self._jobs.get()
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again in the caller
                done.set_exception(error)

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except EngineError as error:
            self._core.fail_all(error)
        except Exception as error:  # noqa: BLE001  every request ends with the error
            self._core.fail_all(DecodeError(f"the decode loop failed: {type(error).__name__}: {error}"))
