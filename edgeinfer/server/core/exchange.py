"""What every route works with: the models, the limits, the gate, what is counted and written down. And
one request's state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from edgeinfer.errors import QueueFullError
from edgeinfer.host import Start
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.interface import Generation
from edgeinfer.server.core.limits import Limits
from edgeinfer.server.core.model_pool import Models
from edgeinfer.server.core.problems import Dialect, Problem, from_validation
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.observe.logs import Log
from edgeinfer.server.observe.metrics import Metrics
from edgeinfer.server.observe.payload_log import PayloadLog
from edgeinfer.server.observe.tracing import Tracer

T = TypeVar("T")


class Endpoint:
    """One served endpoint. Lives on one event loop."""

    def __init__(
        self,
        models: Models,
        gate: Gate,
        limits: Limits,
        log: Log,
        tracer: Tracer,
        payloads: PayloadLog | None,
        start: Start,
    ) -> None:
        self.models = models
        self.gate = gate
        self.limits = limits
        self.log = log
        self.tracer = tracer
        self.payloads = payloads
        self.start = start
        self.metrics = Metrics(models.engines)
        self.threads = ThreadPoolExecutor(8, "calls")
        self.draining = False
        self.ready_said = False
        #: Set by whoever runs the endpoint: stop taking requests and end; called on the event loop.
        self.drain: Callable[[str], None] = lambda why: None
        self.running: set[Generation] = set()
        self.in_flight = 0
        self.last_activity = time.monotonic()
        #: Generations in each model, waiting or running.
        self.inside: Counter[str] = Counter()
        self._by_key: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Admit a request that will use a model. Raises Problem 503 and 429 with Retry-After."""
        if self.draining:
            raise Problem(
                503,
                "The endpoint is shutting down.",
                kind="server_error",
                code="shutting_down",
                retry_after_s=2,
            )
        if self.in_flight >= self.limits.max_requests:
            self.metrics.refused.labels("requests").inc()
            raise Problem(
                503,
                "Too many requests at once.",
                kind="server_error",
                code="queue_full",
                retry_after_s=1,
            )
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
        if key:
            self._by_key[key] += 1

    def leave(self, key: str) -> None:
        self.in_flight -= 1
        self.last_activity = time.monotonic()
        if key:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]

    def queue(self, model: str, n_parallel: int, n: int) -> None:
        """Count `n` more generations into a model; whoever counts them calls `unqueue`. Raises
        QueueFullError.
        """
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

    async def in_thread(self, work: Any, *args: Any) -> Any:
        """Run a blocking call of an engine beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


class Exchange:
    """One request on its way: who asked, when, and what became of it. Kept in the ASGI scope."""

    def __init__(
        self,
        endpoint: Endpoint,
        request_id: str,
        route: str,
        dialect: Dialect,
        headers: Mapping[str, str],
    ) -> None:
        self.endpoint = endpoint
        self.id = request_id
        self.route = route
        self.dialect = dialect
        self.headers = headers
        self.key = ""
        self.started = time.perf_counter()
        self.started_ns = time.time_ns()
        self.status = 0
        self.model = ""
        self.version = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.ttft_s: float | None = None
        self.how = ""
        self.body: Any = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def first_token(self) -> None:
        self.ttft_s = self.seconds
        self.endpoint.metrics.ttft.labels(self.model, self.version).observe(self.ttft_s)

    def ended(self, end: Finished) -> None:
        """A generation of this request has ended."""
        self.prompt_tokens += end.usage.prompt_tokens
        self.completion_tokens += end.usage.completion_tokens
        self.how = end.reason
        self.endpoint.metrics.generation_ended(self.model, self.version, end)
        self.endpoint.tracer.generation(
            dict(self.headers), self.model, self.route, self.started_ns, end
        )

    def payload(self, answer: Any) -> None:
        """Write the exchange to the payload log, if there is one."""
        payloads = self.endpoint.payloads
        if payloads is None:
            return
        try:
            payloads.write(self.id, self.route, self.body, answer)
        except OSError as error:
            self.endpoint.log.error("payload-log", error)


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["edgeinfer"]
    return exchange


async def read_body(request: Request) -> bytes:
    """The body. Raises Problem 413 as soon as it is known to be too long, 400 when the client
    leaves.
    """
    limit = exchange_of(request).endpoint.limits.max_body_bytes
    declared = request.headers.get("content-length", "0")
    too_long = Problem(
        413,
        f"The body is longer than {limit} bytes.",
        code="request_too_large",
        headers={"connection": "close"},
    )
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_long
            parts.append(part)
    except ClientDisconnect:
        raise Problem(400, "The client left.", code="client_disconnected") from None
    return b"".join(parts)


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


async def decode(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises Problem 400 naming the field, 413, 415."""
    content_type = (
        request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    )
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise Problem(415, "The body must be application/json.", code="unsupported_media_type")
    raw = await read_body(request)
    decoder = _decoders.get(kind)
    if decoder is None:  # 0.1 ms each, at first use
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        value: T = decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except msgspec.DecodeError as error:
        raise Problem(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise Problem(400, "The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise Problem(400, "The body is nested too deeply.", code="invalid_json") from None
    exchange = exchange_of(request)
    if exchange.endpoint.payloads is not None:
        exchange.body = msgspec.to_builtins(value)
    return value


def decode_query(request: Request, kind: type[T]) -> T:
    """The query string as `kind`; numbers are read from their text. Raises Problem 400."""
    pairs = request.query_params.multi_items()
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise Problem(400, f"'{name}' is given twice.", param=name, code="invalid_value")
    try:
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
