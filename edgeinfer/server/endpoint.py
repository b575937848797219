"""The endpoint: its components, its running requests, and limits on new ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from edgeinfer.agents.prompt_normalization import PromptNormalizer
from edgeinfer.errors import EdgeInferError, QueueFullError
from edgeinfer.host import Host
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server import problems, tracing
from edgeinfer.server.callers import BodyBudget, EngineSlots, FairPool
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.metrics import Metrics
from edgeinfer.server.model_pool import ModelAdministrator, ModelPool
from edgeinfer.server.problems import Problem
from edgeinfer.server.response_store import ResponseStore
from edgeinfer.server.tracing import Span
from edgeinfer.server.wire_types import Slot

T = TypeVar("T")

if TYPE_CHECKING:
    from edgeinfer.receipts.verify import ReceiptCheck
    from edgeinfer.tools.loop import ChatTools

#: Number of finished generations that /slots lists.
_SLOTS = 64
#: Most traces that wait for the disk; more are dropped. Time (s) to write them at the end.
_TRACES = 1024
_TRACES_S = 1.0


@dataclass(eq=False)
class Endpoint:
    """A served endpoint. Belongs to one event loop."""

    models: ModelPool
    limits: Limits
    log: Log
    host: Host
    _: KW_ONLY
    normalizer: PromptNormalizer = field(default_factory=PromptNormalizer)
    #: Stored responses; None if switched off.
    responses: ResponseStore | None = None
    #: The web page, a `web.routes.Web`; None if switched off.
    web: Any = None
    #: Adds and removes models; None if no client may do so.
    model_admin: ModelAdministrator | None = None
    #: File for traces; "" for none.
    traces: str = ""
    #: Logs requests with their answers (`payload_log.PayloadLog`); None if switched off.
    payload_log: Any = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.models.engines)
        self.bodies = BodyBudget(self.limits)
        self.threads = ThreadPoolExecutor(8, "calls")
        #: Runs engine calls for clients; the threads of `threads` stay free for an operator's requests.
        self.engine_calls = FairPool("engine-calls", 8)
        #: Thread that writes traces, so that a hanging file system blocks only this thread.
        self._tracing = ThreadPoolExecutor(1, "traces")
        self._trace_places = threading.Semaphore(_TRACES)
        self.preparation = PreparationPool(self.limits.prepare_s)
        self.draining = False
        #: Whether the default model has been loaded at least once.
        self.was_ready = False
        self.running: set[Generation | ReceiptCheck] = set()
        self.last_activity = time.monotonic()
        #: Number of waiting or running generations by model.
        self.generation_counts: Counter[str] = Counter()
        #: Slots of the engine of each model in use.
        self.engine_slots: defaultdict[str, EngineSlots] = defaultdict(EngineSlots)
        self._by_key: Counter[str] = Counter()
        #: The latest ended generations, each with the name of its API key.
        self.slots: deque[tuple[str, Slot]] = deque(maxlen=_SLOTS)
        #: The configured tools; None until a request uses them.
        self.tools: ChatTools | None = None
        self._tools_lock = asyncio.Lock()
        #: Held while a snapshot is taken: only one at a time.
        self.snapshot_lock = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Number of running requests that use a model."""
        return self._by_key.total()

    def admit_request(self, key: str) -> None:
        """Admit a request that uses a model. Raises Problem 503 and 429 with Retry-After.

        A key's only request is never refused because of other keys' requests.
        """
        if self.draining:
            raise problems.shutting_down()
        is_only = key != "" and not self._by_key[key]
        if self.in_flight >= self.limits.max_requests and not is_only:
            self.metrics.refused.labels("requests").inc()
            raise problems.unavailable("Too many requests at once.", "queue_full", 1)
        if key and self._by_key[key] >= self.limits.max_per_key:
            self.metrics.refused.labels("per_key").inc()
            raise problems.too_many("Too many requests at once for this key.", 1)
        self._by_key[key] += 1
        self.metrics.in_flight.inc()

    def release_request(self, key: str) -> None:
        self._by_key[key] -= 1
        self.metrics.in_flight.dec()
        self.last_activity = time.monotonic()

    def trace(
        self, root: Span, spans: Iterable[Span], facts: Mapping[str, Any], traceparent: str = ""
    ) -> None:
        """Queue a trace if tracing is on. A failure is logged once and switches tracing off."""
        if self.traces and self._trace_places.acquire(blocking=False):
            self._tracing.submit(self._write_trace, root, tuple(spans), facts, traceparent)

    def _write_trace(self, *trace: Any) -> None:
        try:
            if self.traces:
                tracing.write(self.traces, *trace)
        except Exception as error:  # noqa: BLE001  nothing reads this thread's result
            reason = getattr(error, "strerror", None) or repr(error)
            self.log.warning("traces-ended", path=self.traces, reason=reason)
            self.traces = ""
        finally:
            self._trace_places.release()

    async def end_traces(self) -> None:
        """Wait until the traces are written, but not long if the file system hangs."""
        last = asyncio.wrap_future(self._tracing.submit(int))
        await asyncio.wait([last], timeout=_TRACES_S)
        self._tracing.shutdown(wait=False)

    def admit_generations(self, model: str, n_parallel: int, n: int, caller: str = "") -> None:
        """Count `n` more generations of a model, until `release_generations`. Raises QueueFullError.

        Other callers' generations never exclude a caller's only request.
        """
        is_only = caller != "" and not self.engine_slots[model].has(caller)
        if self.generation_counts[model] + n > n_parallel + self.limits.max_queue and not is_only:
            self.metrics.refused.labels("queue").inc()
            answers = f"{self.generation_counts[model]} answers are running or waiting"
            raise QueueFullError(f"The queue of {model} is full: {answers}")
        self.generation_counts[model] += n
        self.engine_slots[model].n_parallel = n_parallel

    def release_generations(self, model: str, n: int, caller: str = "") -> None:
        """Undo `admit_generations`; a caller with an API key also gives its slots back."""
        self.engine_slots[model].give_back(caller, n)
        self.generation_counts[model] -= n
        if not self.generation_counts[model]:
            del self.generation_counts[model], self.engine_slots[model]

    def problem_of(self, error: Exception, request_id: str) -> Problem:
        """Convert `error` to an answer; the log gets the traceback of a defect."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, EdgeInferError):
            return problems.from_error(error)
        self.log.error("internal", error, request_id=request_id)
        return problems.internal(request_id)

    def cancel_all(self) -> None:
        """Cancel every generation at its next step; each client is told why."""
        for generation in tuple(self.running):
            generation.cancel()

    def failure(self) -> str:
        """Return why the endpoint cannot answer; "" if it can."""
        engine = dict(self.models.engines()).get(self.models.default)
        return self.preparation.failure() or (engine.health() if engine else "")

    async def use_tools(self) -> ChatTools:
        """Return the configured tools. The first call asks each server for its list of tools.

        Raises ConfigError, and UsageError if none are configured.
        """
        async with self._tools_lock:
            if self.tools is None:
                from edgeinfer.tools.loop import ChatTools  # 20 ms, which few endpoints need

                tools = ChatTools(self.host.config.tools, Path.cwd())
                for message in await self.in_thread(tools.prepare):
                    self.log.warning("tools", message=message)
                self.tools = tools
        return self.tools

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, work, *args)


class PreparationPool:
    """Prepares requests in threads: template, schema, grammar, tokens. Belongs to one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._plain = FairPool("prepare", 4)
        self._constrained = FairPool("compile", 2)
        #: Threads that decode new files, which may take a minute; other requests do not wait for them.
        self._files = FairPool("decode", 4)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    def caller_turn(self, caller: str, request: GenerateRequest) -> AbstractAsyncContextManager[object]:
        """Return a context manager that waits for the client's turn to prepare such a request.

        Waiting requests hold no slot of the engine. A client "" does not wait.
        """
        if not caller:
            return nullcontext()
        pool = self._pool(request)
        return self._turns.setdefault((pool.name, caller), asyncio.Semaphore(pool.most_of_key))

    def _pool(self, request: GenerateRequest) -> FairPool:
        if request.n_pictures:
            return self._files
        return self._constrained if request.constraint or request.tools else self._plain

    async def submit(self, engine: Engine, request: GenerateRequest, caller: str = "") -> Generation:
        """Submit in a thread; cancel the generation if the client left meanwhile.

        Raises what `Engine.submit` raises, and Problem 503 after `timeout_s`.
        """
        submitting = self._pool(request).begin(caller, lambda: engine.submit(request))
        return await self._result(submitting, _cancel_late)

    async def read_files(self, caller: str, work: Callable[[], T]) -> T:
        """Run `work`, which decodes files, in a thread. Raises Problem 503 and what it raises."""
        return await self._result(self._files.begin(caller, work), lambda late: None)

    async def _result(self, future: Future[T], ended_late: Callable[[Future[T]], None]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            future.add_done_callback(ended_late)
            message = (
                f"Preparing this request took longer than {self._timeout_s:g} s: the endpoint is "
                "overloaded, or the schema, tools or prompt are too expensive."
            )
            raise problems.unavailable(message, "preparation_timeout", 10) from None
        except asyncio.CancelledError:
            future.add_done_callback(ended_late)
            raise

    def failure(self) -> str:
        """Name a pool in which no thread became free for `timeout_s`; "" if there is none."""
        for pool in (self._plain, self._constrained):
            if pool.is_stuck(self._timeout_s):
                return f"no thread to {pool.name} requests has become free for {self._timeout_s:g} s"
        return ""

    def close(self) -> None:
        """Submit nothing more; running calls finish."""
        for pool in (self._plain, self._constrained, self._files):
            pool.close()


def _cancel_late(submitting: Future[Generation]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
