"""The endpoint: its components, and the limits on requests and generations."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from edgeinfer.agents.prompt_normalization import PromptNormalizer
from edgeinfer.errors import EdgeInferError, QueueFullError
from edgeinfer.host import EngineHost
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server import problems, tracing
from edgeinfer.server.callers import BodyBudget, EngineSlots, FairPool
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.metrics import Metrics
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.model_pool import ModelAdministrator, ModelPool
from edgeinfer.server.problems import Problem
from edgeinfer.server.response_store import ResponseStore
from edgeinfer.server.tracing import Span, start_spans
from edgeinfer.server.wire_types import Slot

T = TypeVar("T")

if TYPE_CHECKING:
    from edgeinfer.receipts.verify import ReceiptCheck
    from edgeinfer.tools.loop import ChatTools

#: Number of ended generations that GET /slots lists.
_SLOTS = 64
#: Maximum number of requests whose traces wait to be written. Further traces are dropped.
_TRACES = 1024
_TRACES_S = 1.0


@dataclass(eq=False)
class Endpoint:
    """The state that all requests share. Not thread-safe: use it on its event loop."""

    models: ModelPool
    limits: Limits
    log: Log
    host: EngineHost
    _: KW_ONLY
    normalizer: PromptNormalizer = field(default_factory=PromptNormalizer)
    #: Stored responses of /v1/responses; None if switched off.
    responses: ResponseStore | None = None
    #: The chat page (`web.access.Web`); None if switched off.
    web: Any = None
    #: Adds and removes models; None if no client may do so.
    model_admin: ModelAdministrator | None = None
    #: Path of the file to which the trace (spans) of each request is appended; "" for none.
    traces: str = ""
    #: Logs requests with their answers (`payload_log.PayloadLog`); None if switched off.
    payload_log: Any = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.models.engines)
        self.models.on_loaded = self._report_loaded
        self.bodies = BodyBudget(self.limits)
        self.threads = ThreadPoolExecutor(8, "calls")
        #: Runs calls like tokenize and embed, so that `threads` stays free for health and metrics.
        self.engine_calls = FairPool("engine-calls", 8)
        #: Writes traces in a separate thread, because a file system may hang.
        self._tracing = ThreadPoolExecutor(1, "traces")
        self._trace_places = threading.Semaphore(_TRACES)
        self.preparation = PreparationPool(self.limits.prepare_s)
        self.draining = False
        #: Whether the default model has been loaded at least once.
        self.was_ready = False
        #: Running generations and receipt checks, which `cancel_all` cancels.
        self.running: set[Generation | ReceiptCheck] = set()
        self.last_activity = time.monotonic()
        #: Model → number of its waiting and running generations.
        self.generation_counts: Counter[str] = Counter()
        #: Model → decode slots of its engine.
        self.engine_slots: defaultdict[str, EngineSlots] = defaultdict(EngineSlots)
        self._by_key: Counter[str] = Counter()
        #: The latest ended generations, each with the name of the API key that requested it.
        self.slots: deque[tuple[str, Slot]] = deque(maxlen=_SLOTS)
        #: The configured MCP tools; None until a request uses them.
        self.tools: ChatTools | None = None
        self._tools_lock = asyncio.Lock()
        #: Held while a snapshot is taken, so that requests take snapshots one after the other.
        self.snapshot_lock = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Number of running requests that use a model."""
        return self._by_key.total()

    def admit_request(self, key: str) -> None:
        """Count a running request until `release_request`, and check the limits.

        Raises Problem 503 (too many requests, or draining) and 429 (too many of this key). A key
        without running requests is always admitted, so that other keys cannot block it.
        """
        if self.draining:
            raise problems.shutting_down()
        is_only = key != "" and not self._by_key[key]
        if self.in_flight >= self.limits.max_requests and not is_only:
            self.metrics.refused.labels("requests").inc()
            raise problems.unavailable("Too many requests at once: try again later.", "queue_full", 1)
        if key and self._by_key[key] >= self.limits.max_per_key:
            self.metrics.refused.labels("per_key").inc()
            raise problems.too_many("Too many requests at once for this key: try again later.", 1)
        self._by_key[key] += 1
        self.metrics.in_flight.inc()

    def release_request(self, key: str) -> None:
        self._by_key[key] -= 1
        self.metrics.in_flight.dec()
        self.last_activity = time.monotonic()

    def _report_loaded(self, model: str, loaded: LoadedEngine, seconds: float) -> None:
        self.metrics.model_loaded(model, loaded.how, seconds, loaded.stages_ms)
        log = {"how": loaded.how, "where": loaded.where, "seconds": round(seconds, 3)}
        self.log.info("model-loaded", model=model, **log)
        now_s = time.perf_counter()
        spans = start_spans(loaded.stages_ms, loaded.how)
        root = Span(f"start {model}", min([now_s - seconds, *(span.began_s for span in spans)]), now_s)
        self.trace(root, spans, {"edgeinfer.how": loaded.how, "edgeinfer.where": loaded.where})
        for text in loaded.engine.info.warnings:
            self.log.warning("model-warning", model=model, reason=text)

    def trace(
        self, root: Span, spans: Iterable[Span], attributes: Mapping[str, Any], traceparent: str = ""
    ) -> None:
        """Queue a trace to be written to the file of traces, if tracing is on.

        `tracing.write` explains the parameters. If too many traces wait, this one is dropped. The first
        write that fails switches tracing off.
        """
        if self.traces and self._trace_places.acquire(blocking=False):
            self._tracing.submit(self._write_trace, root, tuple(spans), attributes, traceparent)

    def _write_trace(self, *trace: Any) -> None:
        try:
            if self.traces:
                tracing.write(self.traces, *trace)
        except Exception as error:  # noqa: BLE001  an exception would be lost in this thread: log it
            reason = getattr(error, "strerror", None) or repr(error)
            self.log.warning("traces-ended", path=self.traces, reason=reason)
            self.traces = ""
        finally:
            self._trace_places.release()

    async def end_traces(self) -> None:
        """Wait up to `_TRACES_S` until the queued traces are written."""
        last = asyncio.wrap_future(self._tracing.submit(int))
        await asyncio.wait([last], timeout=_TRACES_S)
        self._tracing.shutdown(wait=False)

    def admit_generations(self, model: str, n_parallel: int, n: int, caller: str = "") -> None:
        """Count `n` running or waiting generations of a model until `release_generations`.

        Raises QueueFullError if more than `n_parallel` (the engine's slots) plus `max_queue` would run
        or wait. A caller that holds no slot is always admitted, unless `caller` is "".
        """
        is_only = caller != "" and not self.engine_slots[model].has(caller)
        if self.generation_counts[model] + n > n_parallel + self.limits.max_queue and not is_only:
            self.metrics.refused.labels("queue").inc()
            n_answers = self.generation_counts[model]
            message = f"The queue of {model} is full: {n_answers} answers are running or waiting"
            raise QueueFullError(message)
        self.generation_counts[model] += n
        self.engine_slots[model].n_parallel = n_parallel

    @contextlib.asynccontextmanager
    async def wait_for_slots(
        self, model: str, n_parallel: int, requests: Sequence[GenerateRequest], caller: str
    ) -> AsyncIterator[None]:
        """Take the slots that `requests` need, waiting if necessary, then run the block.

        The block submits the requests. If the block fails, the slots are given back; otherwise the
        caller must call `release_generations` after the generations. Raises QueueFullError.
        """
        n, has_slots = len(requests), False
        self.admit_generations(model, n_parallel, n, caller)
        try:
            async with self.preparation.caller_turn(caller, requests[0]):
                if caller:
                    await self.engine_slots[model].take(caller, n)
                has_slots = True
                yield
        except BaseException:
            self.release_generations(model, n, caller if has_slots else "")
            raise

    def release_generations(self, model: str, n: int, caller: str = "") -> None:
        """Undo `admit_generations`, and give back `n` slots of `caller` (the caller "" holds none)."""
        if caller:
            self.engine_slots[model].give_back(caller, n)
        self.generation_counts[model] -= n
        if not self.generation_counts[model]:
            del self.generation_counts[model], self.engine_slots[model]

    def problem_of(self, error: Exception, request_id: str) -> Problem:
        """Convert an exception to an HTTP error; log the traceback if it was unexpected (a 500)."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, EdgeInferError):
            return problems.from_error(error)
        self.log.error("internal", error, request_id=request_id)
        message = f"Internal error; the endpoint's log describes it under request id {request_id}."
        return Problem(500, message, code="internal_error")

    def cancel_all(self) -> None:
        """Cancel every generation at its next decode step; clients get an error 503."""
        for generation in tuple(self.running):
            generation.cancel()

    def failure(self) -> str:
        """Return why the endpoint cannot generate text; "" if it can."""
        engine = dict(self.models.engines()).get(self.models.default)
        return self.preparation.failure() or (engine.health() if engine else "")

    async def use_tools(self) -> ChatTools:
        """Return the configured tools. The first call connects to the MCP servers.

        Raises ConfigError, and UsageError if no tools are configured.
        """
        async with self._tools_lock:
            if self.tools is None:
                # this import takes 20 ms, and few endpoints need it
                from edgeinfer.tools.loop import ChatTools

                tools = ChatTools(self.host.config.tools, Path.cwd())
                for message in await self.in_thread(tools.prepare):
                    self.log.warning("tools", message=message)
                self.tools = tools
        return self.tools

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run the blocking call `work(*args)` in a thread, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, work, *args)


class PreparationPool:
    """Threads in which requests are prepared: chat template, grammar compilation, tokenization."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._plain = FairPool("prepare", 4)
        self._constrained = FairPool("compile", 2)
        #: Decodes files in separate threads: decoding may take a minute, and must not delay requests
        #: without files.
        self._files = FairPool("decode", 4)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    def caller_turn(
        self, caller: str, request: GenerateRequest
    ) -> contextlib.AbstractAsyncContextManager[object]:
        """Return a context manager that waits until fewer than half of the threads work for `caller`.

        Requests with pictures, those with a constraint or tools, and plain ones have separate threads;
        only the threads for requests like `request` count. Enter the context before taking slots of the
        engine, so that a waiting request holds no slot. The caller "" does not wait.
        """
        if not caller:
            return contextlib.nullcontext()
        pool = self._pool(request)
        return self._turns.setdefault((pool.name, caller), asyncio.Semaphore(pool.max_of_caller))

    def _pool(self, request: GenerateRequest) -> FairPool:
        if request.n_pictures:
            return self._files
        return self._constrained if request.constraint or request.tools else self._plain

    async def submit(self, engine: Engine, request: GenerateRequest, caller: str = "") -> Generation:
        """Call `engine.submit` in a thread.

        After `timeout_s`, cancels `request` and raises Problem 503. Raises what `Engine.submit` raises.
        """
        submitting = self._pool(request).begin(caller, lambda: engine.submit(request))
        return await self._result(submitting, _cancel_late)

    async def read_files(self, caller: str, work: Callable[[], T]) -> T:
        """Run `work`, which decodes files, in a thread, and return its result.

        Raises what `work` raises, and Problem 503 after `timeout_s`.
        """
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
        """Return an error text if requests can no longer be prepared; "" if they can.

        They cannot if all threads for plain requests, or all threads for requests with a constraint or
        tools, have been busy with one request each for `timeout_s`.
        """
        for pool in (self._plain, self._constrained):
            if pool.is_stuck(self._timeout_s):
                return f"no thread to {pool.name} requests has become free for {self._timeout_s:g} s"
        return ""

    def close(self) -> None:
        """Drop waiting work and return at once; running work finishes."""
        for pool in (self._plain, self._constrained, self._files):
            pool.close()


def _cancel_late(submitting: Future[Generation]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
