"""Share the endpoint's memory, threads and engine slots fairly between clients (API keys or users).

No client can take all of a resource, so the others always make progress.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import msgspec

from edgeinfer.media.pictures import current_caller
from edgeinfer.server.limits import Limits
from edgeinfer.server.problems import too_many, unavailable

T = TypeVar("T")


class Caller(msgspec.Struct, frozen=True):
    """The client of a request.

    `name` is the name of the API key (8 hex digits of its digest). Without API keys, `name` is "" for
    the user who runs the endpoint, `uid-N` for another user. An administrator (`is_admin`) may change
    models and settings that all clients share. `turn` names the queue in which the client's requests
    wait; the queues are served round-robin. With the `turn` "", requests do not wait for other clients.
    """

    name: str
    is_admin: bool
    turn: str = ""


NOBODY = Caller("", is_admin=False)
#: The user who runs the endpoint, also for `edgeinfer batch`, which runs in the same process.
OWN = Caller("", is_admin=True)


class BodyBudget:
    """Limits the total bytes of the bodies of running requests. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._max_of_caller_bytes = max(limits.max_bodies_bytes // 2, limits.max_body_bytes)
        self._by_caller: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._by_caller.total()

    def take(self, caller: str, n_bytes: int) -> None:
        """Reserve `n_bytes` for a body of `caller` until `give_back`.

        Raises Problem 503 if the bodies of all callers exceed the limit, 429 if those of `caller` do.
        """
        if self.total + n_bytes > self._max_bytes:
            raise unavailable(
                "The bodies of all running requests together are too large.", "queue_full", 1
            )
        if caller and self._by_caller[caller] + n_bytes > self._max_of_caller_bytes:
            raise too_many("The bodies of this API key's running requests together are too large.", 1)
        self._by_caller[caller] += n_bytes

    def give_back(self, caller: str, n_bytes: int) -> None:
        self._by_caller[caller] -= n_bytes


class RoundRobin(Generic[T]):
    """A queue with one FIFO per caller, from which callers are served in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def add(self, caller: str, item: T) -> None:
        self._waiting.setdefault(caller, deque()).append(item)

    def pop(self, may_begin: Callable[[str, T], bool]) -> tuple[str, T] | None:
        """Remove the oldest item of the next caller for which `may_begin(caller, item)` is true.

        Return (caller, item); None if no caller may begin.
        """
        for caller, items in self._waiting.items():
            if may_begin(caller, items[0]):
                item = items.popleft()
                if items:
                    self._waiting.move_to_end(caller)
                else:
                    del self._waiting[caller]
                return caller, item
        return None


class FairPool:
    """A thread pool in which one caller gets at most half of the threads. Thread-safe.

    The caller "" may use all threads.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.name = name
        self._n_threads = n_threads
        self.max_of_caller = n_threads // 2
        self._threads = ThreadPoolExecutor(n_threads, name)
        self._lock = threading.Lock()
        self._waiting: RoundRobin[tuple[Future[Any], Callable[[], Any]]] = RoundRobin()
        #: Future of running work → its caller, and when the work started (time.monotonic(), s).
        self._running: dict[object, tuple[str, float]] = {}

    def begin(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Queue `work`, which runs in a thread when it is the caller's turn."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.add(caller, (future, work))
        self._fill()
        return future

    def _fill(self) -> None:
        with self._lock:
            while len(self._running) < self._n_threads:
                turn = self._waiting.pop(self._may_begin)
                if turn is None:
                    return
                caller, (future, work) = turn
                if future.set_running_or_notify_cancel():
                    self._running[future] = (caller, time.monotonic())
                    self._threads.submit(self._run, caller, future, work)

    def _may_begin(self, caller: str, _: object) -> bool:
        n_own = sum(running == caller for running, _ in self._running.values())
        return not caller or n_own < self.max_of_caller

    def _run(self, caller: str, future: Future[Any], work: Callable[[], Any]) -> None:
        current_caller.set(caller)
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  the future raises the error to its caller
            self._end(future)
            future.set_exception(error)
        else:
            self._end(future)
            future.set_result(result)

    def _end(self, future: Future[Any]) -> None:
        with self._lock:
            del self._running[future]
        self._fill()

    def is_stuck(self, after_s: float) -> bool:
        """Return whether every thread has been busy with one piece of work for more than `after_s`."""
        with self._lock:
            started = [since for _, since in self._running.values()]
        return len(started) == self._n_threads and time.monotonic() - max(started) > after_s

    def close(self) -> None:
        """Drop queued work and return at once; running work finishes."""
        with self._lock:
            self._waiting = RoundRobin()
        self._threads.shutdown(wait=False, cancel_futures=True)


#: Number of generations that are submitted beyond the engine's slots, so that no slot ever idles.
_AHEAD = 2
#: Number of slots from which on a single caller can take all but one, so that other callers need not
#: wait.
_SHARED_FROM = 4


class EngineSlots:
    """Gives the decode slots of one model's engine to waiting callers in turn. Not thread-safe.

    The engine itself serves requests in order of arrival. Therefore only as many requests are submitted
    as the engine has slots, plus two, so that no slot idles; other requests wait here. A caller that
    holds no slot gets slots at once, even if none is free.
    """

    def __init__(self) -> None:
        #: Number of sequences that the engine, or all replicas together, decode at a time.
        self.n_parallel = 1
        self._slots_taken: Counter[str] = Counter()
        self._waiting: RoundRobin[tuple[int, asyncio.Future[None]]] = RoundRobin()

    async def take(self, caller: str, n: int) -> None:
        """Wait for `n` slots and take them for `caller`. `give_back` releases them."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(caller, (n, future))
        self._fill()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self.give_back(caller, n)
            raise

    def has(self, caller: str) -> bool:
        """Return whether `caller` holds slots.

        If not, `take` gives slots to `caller` at once, even if none is free.
        """
        return self._slots_taken[caller] > 0

    def give_back(self, caller: str, n: int) -> None:
        self._slots_taken[caller] -= n
        self._fill()

    def _may_begin(self, caller: str, turn: tuple[int, asyncio.Future[None]]) -> bool:
        (n, future), n_own = turn, self._slots_taken[caller]
        max_of_caller = self.n_parallel - (self.n_parallel >= _SHARED_FROM)
        has_room = self._slots_taken.total() + n <= self.n_parallel + _AHEAD
        return future.cancelled() or not n_own or (has_room and n_own + n <= max_of_caller)

    def _fill(self) -> None:
        while (waiting := self._waiting.pop(self._may_begin)) is not None:
            caller, (n, future) = waiting
            if not future.done():
                self._slots_taken[caller] += n
                future.set_result(None)
