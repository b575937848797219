"""The state of one request, which every handler gets, and helpers for JSON answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.config.config_file import PromptRule
from edgeinfer.errors import UnknownModelError
from edgeinfer.receipts.receipt import Receipt, Refusal
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import CacheReport, Finished
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import Message
from edgeinfer.server.callers import NOBODY, Caller
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.metrics import version_of
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import keep_alive_s
from edgeinfer.server.tracing import Span, generation_spans
from edgeinfer.server.wire_types import ModelFields, Slot

R = TypeVar("R", bound=msgspec.Struct)

#: Most names, and characters of each, in the header of ignored fields: servers and proxies limit it.
_MAX_IGNORED = 32
_MAX_NAME = 96
#: Characters that stand in no header, and the comma, which separates its names.
_UNSAFE = re.compile(r"[^ -+\--~]")


@dataclass(eq=False)
class RequestContext:
    """The state of one request: its client, its model, its outcome. The ASGI scope holds it."""

    endpoint: Endpoint
    id: str
    operation: Operation | None
    dialect: Dialect
    headers: Mapping[str, str]
    #: The value of `{id}` in the path.
    path_id: str
    #: Headers of the answer; every handler and middleware may add some.
    reply_headers: dict[str, str]
    #: The HTTP request; set once the request passed all checks.
    request: Request = field(init=False)
    caller: Caller = NOBODY
    #: Only requests with the same salt share cached prefixes; "" is shared by all.
    cache_salt: str = ""
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    model: str = ""
    #: The adapter that the request named in place of a model.
    adapter: str = ""
    version: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    outcome: str = ""
    #: The request's body as received.
    body: bytes | None = None
    #: For the payload log: the answers, the failure, and whether the client left before the end.
    answers: list[CollectedAnswer] = field(default_factory=list)
    #: Receipts of the answers, if the client asked for them or the payload log is on.
    receipts: list[Receipt | Refusal] = field(default_factory=list)
    problem: Problem | None = None
    client_left: bool = False
    #: Bytes of `Endpoint.bodies` that this request holds.
    held_bytes: int = 0
    #: The prompt normalization rules that changed the prompt.
    normalized: tuple[PromptRule, ...] = ()
    #: Spans for the trace; `tokenizing_s` is the time (s) at which the model was loaded.
    spans: list[Span] = field(default_factory=list)
    tokenizing_s: float = 0.0
    #: Whether the request's generations wait for slots of the model's engine.
    is_queued: bool = False
    #: Fields and headers of the request that were ignored.
    ignored: list[str] = field(default_factory=list)

    def hold(self, n_bytes: int) -> None:
        """Count bytes that this request holds until it ends. Raises Problem 429 and 503."""
        self.endpoint.bodies.take(self.caller.turn, n_bytes)
        self.held_bytes += n_bytes

    def ignore(self, names: Iterable[str]) -> None:
        """Tell the client and the log which parts of the request are ignored."""
        cleaned = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in names]
        self.ignored = [*self.ignored, *cleaned][:_MAX_IGNORED]
        if self.ignored:
            self.reply_headers["x-edgeinfer-ignored"] = ", ".join(self.ignored)

    @property
    def key(self) -> str:
        """Name of the client, which separates its files, answers and cached prefixes from others."""
        return self.caller.name

    @property
    def is_admin(self) -> bool:
        """Return whether the client may change models and settings for other clients."""
        return self.caller.is_admin

    @property
    def plain_id(self) -> str:
        """Id without its prefix, for ids in another API's form."""
        return self.id.removeprefix("req_")

    @property
    def route(self) -> str:
        """Path pattern of the operation, `other` for an unknown path."""
        return self.operation.path if self.operation else "other"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def normalize(
        self, turns: Sequence[Message], *, stores_prefix: bool = False
    ) -> tuple[Message, ...]:
        """Normalize a known agent's prompt; a header names the rules that changed it."""
        turns, self.normalized = self.endpoint.normalizer.normalize(
            turns,
            self.headers.get("user-agent", ""),
            cache_salt=self.cache_salt if stores_prefix else None,
        )
        if self.normalized:
            self.reply_headers["x-edgeinfer-normalized"] = ", ".join(self.normalized)
        return turns

    def add_salt(self, cache_salt: str) -> str:
        """Combine a request's `cache_salt` with its API key's, so that keys share no cached prefix."""
        return f"{self.cache_salt} {cache_salt}" if self.cache_salt else cache_salt

    def keep_alive_s(self, keep_alive: float | str | None) -> float | None:
        """Return how long (s) the model stays loaded after this request; None means as configured.

        Only administrators may choose it. Raises InvalidRequestError.
        """
        seconds = keep_alive_s(keep_alive)
        if seconds is None or self.is_admin:
            return seconds
        self.ignore(["keep_alive"])
        return None

    def name_model(self, name: str | None) -> None:
        """Resolve the request's model, or the adapter that it names instead.

        A header gives the model's name if the request used another name. Raises UnknownModelError.
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

    def record_generation(self, finished: Finished) -> None:
        """Record a finished generation of this request."""
        if self.endpoint.traces:
            self.spans += generation_spans(self.tokenizing_s, finished.timings)
        self.prompt_tokens += finished.usage.prompt_tokens
        self.cached_tokens += finished.usage.cached_tokens
        self.completion_tokens += finished.usage.completion_tokens
        self.outcome = finished.reason
        if finished.divergence.cause != "off":  # `cache_prompt: false` has no cached prefix to report
            self.endpoint.slots.appendleft((self.key, _slot(self, finished)))
            self.endpoint.host.note_prompt(CacheReport.of(self.model, finished))
        self.endpoint.metrics.generation_ended(self.model, self.version, finished)


def _slot(context: RequestContext, finished: Finished) -> Slot:
    usage, where = finished.usage, finished.divergence
    return Slot(
        id_task=context.id,
        model=context.model,
        n_prompt_tokens=usage.prompt_tokens,
        cache_n=usage.cached_tokens,
        cache_disk_n=usage.cached_disk_tokens,
        prompt_n=usage.prompt_tokens - usage.cached_tokens,
        n_decoded=usage.completion_tokens,
        finish_reason=finished.reason,
        n_diverged=where.n_tokens,
        cause=where.cause,
    )


def context_of(request: Request) -> RequestContext:
    context: RequestContext = request.scope["edgeinfer"]
    return context


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode `value` as application/json."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def with_engine(context: RequestContext, body: ModelFields, work: Callable[[Engine], R]) -> R:
    """Run `work(engine)` in a thread with the model of `body`. Raises what loading and `work` raise."""
    context.name_model(body.model)
    keep_alive = context.keep_alive_s(body.keep_alive)
    with await context.endpoint.models.acquire(context.model, keep_alive) as lease:
        context.version = version_of(lease.engine.info.sha256)
        calls, engine = context.endpoint.engine_calls, lease.engine
        return await asyncio.wrap_future(calls.begin(context.caller.turn, lambda: work(engine)))
