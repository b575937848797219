"""An `Engine` that distributes requests over replicas of one model, each in a worker process.

A request goes to the replica that has its prefix cached, unless that one has many more requests than
another; otherwise to the one with the fewest requests. If a replica is added, or if one dies, requests
that are still queued move to another replica. A request that has begun fails if its replica dies.
`replica_supervisor.ReplicaSupervisor` starts and replaces the replicas.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from edgeinfer import prefix_affinity
from edgeinfer.errors import EngineClosedError, EngineError
from edgeinfer.runtime.event_stream import EventStream, Item
from edgeinfer.runtime.events import Finished, Progress
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, ReplicaInfo, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.workers.remote_engine import ForwardingEngine, RemoteEngine

T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """A worker process with the model. `how` says how it started: "resumed" or "cold".

    Replicas have the `number` 1, 2, … in the order in which they were added. `requests` has the running
    and queued requests; `calls` is the number of running calls of methods other than `submit`.
    """

    engine: RemoteEngine
    how: str
    n_threads: int
    number: int = 0
    requests: set[RoutedRequest] = field(default_factory=set)
    calls: int = 0

    @property
    def load(self) -> int:
        """Number of running and queued requests and calls."""
        return len(self.requests) + self.calls


class ReplicatedEngine(ForwardingEngine):
    """Several replicas of a model behind the interface of one engine."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._changed = threading.Condition()
        self._changing_adapters = threading.Lock()
        self._replicas: list[Replica] = []
        self._routes: dict[RoutedRequest, Replica] = {}
        self._affinity = prefix_affinity.PrefixAffinity()
        self._numbers = 0
        self._movers = ThreadPoolExecutor(4, "replicas")
        self._is_closed = False
        self.crashed_total = 0
        # ReplicaSupervisor sets `describe`, `on_death` and `on_close`

        #: Makes a ReplicasInfo of the running replicas, with the configured number and a reason.
        self.describe: Callable[[tuple[ReplicaInfo, ...]], ReplicasInfo]
        #: Called, in any thread, when a replica's process has ended.
        self.on_death: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        """Return whether the engine accepts requests; they wait as long as no replica is running."""
        return not self._is_closed

    def health(self) -> str:
        """Return "" (healthy): the supervisor replaces each replica that fails."""
        return ""

    @property
    def info(self) -> EngineInfo:
        """Information about the engine: that of one replica, but `n_parallel` is the sum of all."""
        return self._info

    def submit(self, request: GenerateRequest) -> EventStream:
        """Submit a request to a replica; if none is running, wait until one is.

        Raises what `Engine.submit` raises.
        """
        routed = RoutedRequest(request, self._request_ended, self._reroute)
        self._route(routed)
        return routed.stream

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Load these LoRA adapters in all replicas, also in later ones; return the loaded adapters.

        If a replica raises an EngineError, all get their earlier adapters again.
        """
        with self._changing_adapters:
            before = self._info.lora
            try:
                loaded = self._use_adapters(adapters)
            except EngineError:
                self._use_adapters(before)
                raise
            with self._changed:
                self._info = msgspec.structs.replace(self._info, lora=loaded)
            return self._info.lora

    def _use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        loaded = tuple(adapters)
        for replica in self.usable:
            with contextlib.suppress(EngineClosedError):  # the replica has ended
                loaded = replica.engine.use_adapters(adapters)
        return loaded

    def metrics(self) -> EngineMetrics:
        """Return the metrics summed over all replicas."""
        return EngineMetrics.sum([now for _, now in self._metrics()])

    def replicas(self) -> ReplicasInfo:
        running = tuple(
            ReplicaInfo(
                number=replica.number,
                how=replica.how,
                n_threads=replica.n_threads,
                requests=replica.load,
                completion_tokens_total=now.completion_tokens_total,
            )
            for replica, now in self._metrics()
        )
        return self.describe(running)

    def _metrics(self) -> Iterator[tuple[Replica, EngineMetrics]]:
        with self._changed:
            replicas = list(self._replicas)
        for replica in replicas:
            with contextlib.suppress(EngineClosedError):  # the replica has ended
                yield replica, replica.engine.metrics()

    def close(self) -> None:
        """End all replicas; each gets 30 s to store its pending KV blocks. Idempotent."""
        with self._changed:
            self._is_closed = True
            replicas, self._replicas = self._replicas, []
            self._changed.notify_all()
        self.on_close()
        with ThreadPoolExecutor(len(replicas) or 1) as closers:
            list(closers.map(lambda replica: replica.engine.close(), replicas))
        self._movers.shutdown(wait=False)

    @property
    def usable(self) -> list[Replica]:
        """Replicas whose process is running, the oldest first."""
        with self._changed:
            return [replica for replica in self._replicas if replica.engine.is_open]

    @property
    def waiting(self) -> list[RoutedRequest]:
        """Requests that are still queued in their replica, the oldest first."""
        with self._changed:
            requests = list(self._routes)
        return [request for request in requests if request.is_waiting]

    def add(self, replica: Replica) -> None:
        """Add a replica, load this engine's LoRA adapters in it, and move queued requests to it.

        Raises EngineClosedError after `close`, and what `Engine.use_adapters` raises.
        """
        with self._changing_adapters:
            if replica.engine.info.lora != self._info.lora:
                replica.engine.use_adapters(self._info.lora)
            with self._changed:
                if self._is_closed:
                    raise EngineClosedError("the engine is closed")
                self._numbers += 1
                replica.number = self._numbers
                self._replicas.append(replica)
                self._count_slots()
                self._changed.notify_all()
        self._rebalance(replica)

    def reap(self) -> int:
        """Remove the replicas whose process has ended; return their number."""
        with self._changed:
            dead = [replica for replica in self._replicas if not replica.engine.is_open]
            for replica in dead:
                self._replicas.remove(replica)
            self.crashed_total += len(dead)
            self._count_slots()
            self._changed.notify_all()
        return len(dead)

    def give_up(self) -> None:
        """Close the engine and fail the waiting requests, because no replica can be started."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._movers.shutdown(wait=False)

    def _count_slots(self) -> None:
        usable = len(self.usable)
        parallel = max((replica.engine.info.n_parallel for replica in self._replicas), default=0)
        if usable:
            self._info = msgspec.structs.replace(self._info, n_parallel=parallel * usable)

    def _route(self, request: RoutedRequest) -> None:
        """Choose a replica and submit the request to it. Raises what `Engine.submit` raises."""
        while True:
            replica = self._assign(request)
            try:
                source = replica.engine.submit(request.request)
            except EngineClosedError:
                self._unassign(request)
                self.on_death()
            except BaseException:
                self._unassign(request)
                raise
            else:
                request.follow(source)
                return

    def _route_again(self, request: RoutedRequest) -> None:
        self._unassign(request)
        try:
            self._route(request)
        except EngineError as error:
            request.fail(error)

    def _reroute(self, request: RoutedRequest) -> None:
        """Submit a request of a dead replica again, in another thread, because this may block."""
        self.on_death()
        try:
            self._movers.submit(self._route_again, request)
        except RuntimeError:  # all replicas are closed
            request.fail(_closed())

    def _assign(self, request: RoutedRequest) -> Replica:
        with self._changed:
            usable = self._wait_for_usable()
            replica = self._choose(request, usable)
            replica.requests.add(request)
            self._routes[request] = replica
            self._affinity.note(request.prefix_hashes, replica.number)
        return replica

    def _wait_for_usable(self) -> list[Replica]:
        """Wait until a replica is running. `_changed` must be locked. Raises EngineClosedError."""
        while not (usable := self.usable):
            if self._is_closed:
                raise _closed()
            self._changed.wait()
        return usable

    def _choose(self, request: RoutedRequest, usable: list[Replica]) -> Replica:
        """Return the replica that prefilled the longest prefix of the request.

        If that replica's load exceeds the smallest load by more than half of a replica's slots, or if
        no prefix is known, return the replica with the smallest load.
        """
        least = min(usable, key=lambda replica: replica.load)
        by_number = {replica.number: replica for replica in usable}
        cached_at = by_number.get(self._affinity.find(request.prefix_hashes, by_number))
        if cached_at is None or cached_at.load - least.load > cached_at.engine.info.n_parallel // 2:
            return least
        return cached_at

    def _unassign(self, request: RoutedRequest) -> Replica | None:
        with self._changed:
            replica = self._routes.pop(request, None)
            if replica is not None:
                replica.requests.discard(request)
        return replica

    def _request_ended(self, request: RoutedRequest) -> None:
        replica = self._unassign(request)
        if replica is not None and not replica.engine.is_open:
            self.on_death()

    def _rebalance(self, added: Replica) -> None:
        """Move queued requests to a new replica, the newest first, until it has an equal share."""
        share = len(self.waiting) // max(1, len(self.usable))
        for request in reversed(self.waiting):
            if added.load >= max(share, added.engine.info.n_parallel):
                return
            if request.withdraw():
                self._route_again(request)

    def _forward(self, method: str, kind: type[T], *arguments: Any, **named: Any) -> T:
        """Call a method of the replica with the fewest requests; if it dies, of another replica."""
        while True:
            with self._changed:
                replica = min(self._wait_for_usable(), key=lambda replica: replica.load)
                replica.calls += 1
            try:
                value: T = getattr(replica.engine, method)(*arguments, **named)
            except EngineClosedError:
                self.on_death()
            else:
                return value
            finally:
                with self._changed:
                    replica.calls -= 1


def _closed() -> EngineClosedError:
    return EngineClosedError(
        "no replica of the model is running", hint="send the request again: a replica will be started"
    )


class RoutedRequest:
    """A request that can move to another replica as long as it is queued.

    `on_end(request)` is called when `stream` has ended, `on_lost(request)` if the replica dies while
    the request is still queued. They are called in any thread; that thread holds no lock.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_end: Callable[[RoutedRequest], None],
        on_lost: Callable[[RoutedRequest], None],
    ) -> None:
        self.request = request
        self.prefix_hashes = _prefix_hashes(request)
        self.stream = EventStream(self.cancel)
        self._on_end, self._on_lost = on_end, on_lost
        self._changing = threading.RLock()
        self._source: EventStream | None = None
        self._is_begun = False
        self._is_cancelled = False

    @property
    def is_waiting(self) -> bool:
        """Return whether the request is still queued."""
        return not self._is_begun

    def follow(self, source: EventStream) -> None:
        """Forward the events of `source`, which a replica's `submit` has returned, to `stream`."""
        with self._changing:
            self._source = source
            is_cancelled = self._is_cancelled
        source.pipe(functools.partial(self._receive, source))
        if is_cancelled:
            source.cancel()

    def withdraw(self) -> bool:
        """Cancel the request in its replica, so that the caller can submit it to another one.

        Returns False, and cancels nothing, if the request's generation has begun, or if the client has
        cancelled the request.
        """
        with self._changing:
            source = self._source
            if source is None or self._is_begun or self._is_cancelled:
                return False
            self._source = None
        source.cancel()
        return True

    def fail(self, error: EngineError) -> None:
        self.stream.put(error)
        self._on_end(self)

    def cancel(self) -> None:
        with self._changing:
            self._is_cancelled = True
            source = self._source
        if source is not None:
            source.cancel()

    def _receive(self, source: EventStream, item: Item) -> None:
        with self._changing:
            if source is not self._source:
                return
            is_lost = isinstance(item, EngineClosedError) and not (self._is_begun or self._is_cancelled)
            if is_lost:
                self._source = None
            else:
                self._is_begun = self._is_begun or not (isinstance(item, Progress) and item.queued)
                self.stream.put(item)
        if is_lost:
            self._on_lost(self)
        elif isinstance(item, Finished | EngineError):
            self._on_end(self)


def _prefix_hashes(request: GenerateRequest) -> tuple[int, ...]:
    """Return hashes of cache salt and prompt prefixes. Requests with different salts share no hash."""
    prompt = request.prompt
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt or ()))
    conversation = msgspec.to_builtins([request.tools, request.messages, request.infill])
    return prefix_affinity.prefix_hashes(request.cache_salt, conversation, text)
