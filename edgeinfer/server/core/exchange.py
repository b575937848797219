"""What every route works with: the endpoint, one request's state, and JSON answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.agents import prompt_normalization
from edgeinfer.cache_report import CacheReport
from edgeinfer.config.config_file import SettledLine
from edgeinfer.errors import EngineClosedError, QueueFullError, UnknownModelError
from edgeinfer.host import Host
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import Message
from edgeinfer.server.core.batches import Batches
from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.core.kept import Kept, KeptAnswers
from edgeinfer.server.core.limits import Limits
from edgeinfer.server.core.models.pool import Models
from edgeinfer.server.core.models.values import Shelf
from edgeinfer.server.core.preparation import Preparation
from edgeinfer.server.core.problems import Problem, shutting_down, unavailable
from edgeinfer.server.core.request_parts import keep_alive_s
from edgeinfer.server.core.wire import Slot
from edgeinfer.server.observe.logs import Log
from edgeinfer.server.observe.metrics import Metrics, version_of
from edgeinfer.server.observe.payload_log import Content, PayloadLog

#: Ended generations that /slots tells of.
_SLOTS = 64

R = TypeVar("R", bound=msgspec.Struct)


class Endpoint:
    """One served endpoint. Lives on one event loop."""

    def __init__(
        self,
        models: Models,
        limits: Limits,
        log: Log,
        host: Host,
        *,
        payloads: PayloadLog | None = None,
        refuse_unknown: bool = False,
        settled_lines: Collection[SettledLine] = prompt_normalization.NAMES,
        stored: KeptAnswers | None = None,
        batches: Batches | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.models = models
        self.limits = limits
        self.log = log
        self.host = host
        self.payloads = payloads
        #: Whether an undeclared request field is an error; otherwise it is ignored and named.
        self.refuse_unknown = refuse_unknown
        #: The prompt normalization rules that apply.
        self.settled_lines = settled_lines
        #: Stored responses; None where they are switched off.
        self.stored = stored
        #: Files and batches; None where none are kept.
        self.batches = batches
        #: Adds and removes models; None where no client may.
        self.shelf = shelf
        self.metrics = Metrics(models.engines)
        self.threads = ThreadPoolExecutor(8, "calls")
        self.preparation = Preparation(limits.prepare_s)
        self.reminders = prompt_normalization.Reminders()
        self.draining = False
        #: Another process has the listening sockets: connections end with their next answer.
        self.is_leaving = False
        #: Whether the default model was loaded once.
        self.was_ready = False
        self.running: set[Generation] = set()
        self.in_flight = 0
        self.last_activity = time.monotonic()
        #: Generations in each model, waiting or running.
        self.inside: Counter[str] = Counter()
        self._by_key: Counter[str] = Counter()
        #: The latest generations that have ended, with the names of their keys.
        self.slots: deque[tuple[str, Slot]] = deque(maxlen=_SLOTS)
        #: One snapshot is taken at a time.
        self.taking = asyncio.Lock()

    @property
    def keeps_answers(self) -> bool:
        """Whether there are answers in memory that a client may come back for."""
        return bool(self.stored)

    def enter(self, key: str) -> None:
        """Admit a request that will use a model. Raises Problem 503 and 429 with Retry-After."""
        if self.draining:
            raise shutting_down()
        if self.in_flight >= self.limits.max_requests:
            self.metrics.refused.labels("requests").inc()
            raise unavailable("Too many requests at once.", "queue_full", 1)
        if key and self._by_key[key] >= self.limits.max_per_key:
            self.metrics.refused.labels("per_key").inc()
            raise Problem(
                429,
                "Too many requests at once for this key.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self.in_flight += 1
        self.metrics.in_flight.inc()
        if key:
            self._by_key[key] += 1

    def leave(self, key: str) -> None:
        self.in_flight -= 1
        self.metrics.in_flight.dec()
        self.last_activity = time.monotonic()
        if key:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]

    def queue(self, model: str, n_parallel: int, n: int) -> None:
        """Count `n` more generations into a model, until `unqueue`. Raises QueueFullError."""
        if self.inside[model] + n > n_parallel + self.limits.max_queue:
            self.metrics.refused.labels("queue").inc()
            raise QueueFullError(
                f"The queue of {model} is full: {self.inside[model]} answers are running or waiting"
            )
        self.inside[model] += n

    def unqueue(self, model: str, n: int) -> None:
        self.inside[model] -= n
        if not self.inside[model]:
            del self.inside[model]

    def cancel_all(self) -> None:
        """End every generation at its next step; their clients are told why."""
        for generation in tuple(self.running):
            generation.cancel()

    def failure(self) -> str:
        """Say what keeps the endpoint from answering; "" when nothing does."""
        engine = dict(self.models.engines()).get(self.models.default)
        return self.preparation.failure() or (engine.health() if engine else "")

    async def in_thread(self, work: Any, *args: Any) -> Any:
        """Run a blocking call of an engine beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


class Exchange:
    """One request on its way: who asked, when, and what became of it. Kept in the ASGI scope."""

    def __init__(
        self,
        endpoint: Endpoint,
        request_id: str,
        operation: Operation | None,
        dialect: Dialect,
        headers: Mapping[str, str],
    ) -> None:
        self.endpoint = endpoint
        self.id = request_id
        self.operation = operation
        self.dialect = dialect
        self.headers = headers
        self.key = ""
        #: Whether it may change what others get.
        self.is_admin = False
        #: What is computed for this key is found by requests of this key alone; "" shares it with all.
        self.cache_salt = ""
        self.started = time.perf_counter()
        self.status = 0
        self.model = ""
        #: The adapter that was named in place of a model.
        self.adapter = ""
        self.version = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.ttft_s: float | None = None
        self.how = ""
        #: For the payload log: the wire value or, where it fits none, the bytes that came.
        self.body: Content = None
        #: The JSON of the answer, or its wire value.
        self.answer: Content = None
        #: What makes the answer, where it may be read again.
        self.kept: Kept | None = None
        #: Headers that go onto the answer, whoever makes it.
        self.reply_headers: dict[str, str] = {}
        #: The rules of `changing_lines` that found something.
        self.settled: tuple[SettledLine, ...] = ()
        #: What of the request changed nothing.
        self.ignored: list[str] = []

    def ignore(self, names: Iterable[str]) -> None:
        """Name parts of the request that are ignored to the client and in the log."""
        self.ignored += names
        if self.ignored:
            self.reply_headers["x-edgeinfer-ignored"] = ", ".join(self.ignored)

    @property
    def plain_id(self) -> str:
        """The id without its prefix, for ids in a protocol's own form."""
        return self.id.removeprefix("req_")

    @property
    def uses_model(self) -> bool:
        """Whether the operation counts against the limits."""
        return self.operation is not None and self.operation.uses_model

    @property
    def route(self) -> str:
        """The path as it is written in the operation, `other` where there is none."""
        return self.operation.path if self.operation else "other"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def settle(self, turns: Sequence[Message], *, remembers: bool = False) -> tuple[Message, ...]:
        """The turns without, or with elsewhere, the lines that change in every request; says so."""
        wanted = self.endpoint.settled_lines
        settled, self.settled = prompt_normalization.settle(turns, wanted)
        turns = settled
        if remembers and "reminder" in wanted:
            turns = self.endpoint.reminders.restore(settled, self.cache_salt)
        if turns != settled:
            self.settled = (*self.settled, "reminder")
        if self.settled:
            self.reply_headers["x-edgeinfer-settled"] = ", ".join(self.settled)
        return turns

    def salted(self, cache_salt: str) -> str:
        """The salt of a request that gives `cache_salt`: one key's find nothing of another's."""
        return f"{self.cache_salt} {cache_salt}" if self.cache_salt else cache_salt

    def stay_s(self, keep_alive: float | str | None) -> float | None:
        """Return how long (s) the model stays after this request; None: as configured.

        Administrators alone decide. Raises InvalidRequestError.
        """
        seconds = keep_alive_s(keep_alive)
        if seconds is None or self.is_admin:
            return seconds
        self.ignore(["keep_alive"])
        return None

    def name_model(self, name: str | None) -> None:
        """Note the model that is meant, and its adapter where one is named in its place.

        A header tells the model where it was named otherwise. Raises UnknownModelError.
        """
        models = self.endpoint.models
        try:
            self.model = models.resolve(name)
        except UnknownModelError:
            owner = models.owner_of_adapter(name or "")
            model = owner or (models.lone_model() if self.dialect.answers_any_name else None)
            if model is None:
                raise
            self.model, self.adapter = model, (name or "") if owner else ""
        if name is not None and name != self.model:
            self.reply_headers["x-edgeinfer-model"] = self.model

    def first_token(self) -> None:
        self.ttft_s = self.seconds
        self.endpoint.metrics.ttft.labels(self.model, self.version).observe(self.ttft_s)

    def ended(self, end: Finished) -> None:
        """A generation of this request has ended."""
        self.prompt_tokens += end.usage.prompt_tokens
        self.cached_tokens += end.usage.cached_tokens
        self.completion_tokens += end.usage.completion_tokens
        self.how = end.reason
        if end.divergence.cause != "off":  # `cache_prompt: false` leaves nothing
            self.endpoint.slots.appendleft((self.key, _slot(self, end)))
            self.endpoint.host.note_prompt(CacheReport.of(self.model, end))
        self.endpoint.metrics.generation_ended(self.model, self.version, end)


def _slot(exchange: Exchange, end: Finished) -> Slot:
    usage, where = end.usage, end.divergence
    return Slot(
        id_task=exchange.id,
        model=exchange.model,
        n_prompt_tokens=usage.prompt_tokens,
        cache_n=usage.cached_tokens,
        cache_disk_n=usage.cached_disk_tokens,
        prompt_n=usage.prompt_tokens - usage.cached_tokens,
        n_decoded=usage.completion_tokens,
        finish_reason=end.reason,
        n_diverged=where.n_tokens,
        cause=where.cause,
    )


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["edgeinfer"]
    return exchange


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as application/json."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def with_engine(
    exchange: Exchange, model: str | None, keep_alive: float | str | None, work: Callable[[Engine], R]
) -> R:
    """Hold the request's model while `work(engine)` runs in a thread; raises as both do."""
    models = exchange.endpoint.models
    exchange.name_model(model)
    lease = await models.acquire(exchange.model, exchange.stay_s(keep_alive))
    try:
        exchange.version = version_of(lease.engine.info.sha256)
        reply: R = await exchange.endpoint.in_thread(work, lease.engine)
        exchange.answer = reply
        return reply
    except EngineClosedError:
        lease.failed()
        raise
    finally:
        lease.release()
