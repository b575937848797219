"""Share the endpoint's memory, threads and engine slots fairly between its clients.

No API key can use up any of these.
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
    """The client of a request: the name of its API key, and whether it is an administrator.

    Without API keys the name is "" for the endpoint's own user, `uid-N` for another user. `turn` is the
    name for round-robin scheduling; "" is served at once.
    """

    name: str
    is_admin: bool
    turn: str = ""


NOBODY = Caller("", is_admin=False)
#: The endpoint's own user as the client, for calls in the same process (`edgeinfer batch`).
OWN = Caller("", is_admin=True)


class BodyBudget:
    """Limits the bytes of all running requests' bodies. Only for the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._most = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._most_of_caller = max(limits.max_bodies_bytes // 2, limits.max_body_bytes)
        self._by_caller: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._by_caller.total()

    def take(self, caller: str, n_bytes: int) -> None:
        """Reserve bytes for a body. Raises Problem 429 and 503 with Retry-After beyond the limits."""
        if self.total + n_bytes > self._most:
            raise unavailable("The bodies of all running requests are too large.", "queue_full", 1)
        if caller and self._by_caller[caller] + n_bytes > self._most_of_caller:
            raise too_many("The bodies of this API key's running requests are too large together.", 1)
        self._by_caller[caller] += n_bytes

    def give_back(self, caller: str, n_bytes: int) -> None:
        self._by_caller[caller] -= n_bytes


class RoundRobin(Generic[T]):
    """A queue that serves its clients round-robin."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def add(self, caller: str, item: T) -> None:
        self._waiting.setdefault(caller, deque()).append(item)

    def pop(self, may_begin: Callable[[str, T], bool]) -> tuple[str, T] | None:
        """Take the first startable item, callers in turn; return None if no item may begin."""
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
    """A pool of threads; one API key gets at most half of them. Any thread may use it."""

    def __init__(self, name: str, n_threads: int) -> None:
        self.name = name
        self._n_threads = n_threads
        self.most_of_key = n_threads // 2
        self._threads = ThreadPoolExecutor(n_threads, name)
        self._lock = threading.Lock()
        self._waiting: RoundRobin[tuple[Future[Any], Callable[[], Any]]] = RoundRobin()
        #: Running work → its caller and start time.
        self._running: dict[object, tuple[str, float]] = {}

    def begin(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread when it is the caller's turn."""
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
        return not caller or n_own < self.most_of_key

    def _run(self, caller: str, future: Future[Any], work: Callable[[], Any]) -> None:
        current_caller.set(caller)
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  the future raises it again, where it is awaited
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
        """Return whether every thread has been busy for more than `after_s`."""
        with self._lock:
            started = [since for _, since in self._running.values()]
        return len(started) == self._n_threads and time.monotonic() - max(started) > after_s

    def close(self) -> None:
        """Start no more work; running work finishes."""
        with self._lock:
            self._waiting = RoundRobin()
        self._threads.shutdown(wait=False, cancel_futures=True)


#: Generations submitted beyond the engine's slots, so that the engine's own queue is never empty.
_AHEAD = 2
#: With at least this many slots, one stays free for other keys.
_SHARED_FROM = 4


class EngineSlots:
    """Gives the slots of one model's engine to waiting clients in turn. Belongs to one event loop.

    An engine answers in order of arrival, so only a few of a key's requests are submitted at a time.
    """

    def __init__(self) -> None:
        #: Number of answers that the engine decodes concurrently; it changes with the replicas.
        self.n_parallel = 1
        self._slots_taken: Counter[str] = Counter()
        self._waiting: RoundRobin[tuple[int, asyncio.Future[None]]] = RoundRobin()

    async def take(self, caller: str, n: int) -> None:
        """Wait for `n` slots for `caller`; release them with `give_back`. A caller "" needs none."""
        if not caller:
            return
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
        """Return whether a caller holds slots. Its first slot is granted without waiting."""
        return self._slots_taken[caller] > 0

    def give_back(self, caller: str, n: int) -> None:
        if caller:
            self._slots_taken[caller] -= n
            self._fill()

    def _may_begin(self, caller: str, turn: tuple[int, asyncio.Future[None]]) -> bool:
        (n, future), n_own = turn, self._slots_taken[caller]
        most_of_key = self.n_parallel - (self.n_parallel >= _SHARED_FROM)
        has_room = self._slots_taken.total() + n <= self.n_parallel + _AHEAD
        return future.cancelled() or not n_own or (has_room and n_own + n <= most_of_key)

    def _fill(self) -> None:
        while (waiting := self._waiting.pop(self._may_begin)) is not None:
            caller, (n, future) = waiting
            if not future.done():
                self._slots_taken[caller] += n
                future.set_result(None)
