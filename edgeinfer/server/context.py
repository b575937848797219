"""The state of one request, which every handler gets as `context`, and helpers for handlers."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.agents.known_agents import agent_of
from edgeinfer.config.config_file import PromptRule
from edgeinfer.errors import UnknownModelError
from edgeinfer.receipts.receipt import Receipt, Refusal, with_record
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import CacheReport, Finished
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message
from edgeinfer.server.callers import NOBODY, Caller
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.model_pool import Lease
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import keep_alive_s
from edgeinfer.server.tracing import Span, generation_spans
from edgeinfer.server.wire_types import ModelFields, Slot

B = TypeVar("B", bound=ModelFields)
R = TypeVar("R", bound=msgspec.Struct)

#: Maximum number and length (characters) of names in `x-edgeinfer-ignored`: proxies limit headers.
_MAX_IGNORED = 32
_MAX_NAME = 96
#: Matches characters to replace in `x-edgeinfer-ignored`: the separator (a comma), and unsafe ones.
_UNSAFE = re.compile(r"[^ -+\--~]")


@dataclass(eq=False)
class RequestContext:
    """The state of one request: its client, its model and its outcome. Stored in the ASGI scope.

    `operation` is None if the path is unknown. Errors have the format of the API `dialect`.
    `reply_headers` are added to the response's headers.
    """

    endpoint: Endpoint
    id: str
    operation: Operation | None
    dialect: Dialect
    headers: Mapping[str, str]
    #: The value of `{id}` in the route's path, e.g. a model's name.
    path_id: str
    reply_headers: dict[str, str]
    #: Starlette's request. `request` and `caller` are set after the checks of Host, Origin and API key.
    request: Request = field(init=False)
    caller: Caller = NOBODY
    #: Salt of the client's prefixes: requests share cached prefixes only with an equal salt.
    cache_salt: str = ""
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    model: str = ""
    #: The LoRA adapter that the request named in place of a model.
    adapter: str = ""
    version: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    outcome: str = ""
    body: bytes | None = None
    #: The answers so far, one for each generation of the request.
    answers: list[CollectedAnswer] = field(default_factory=list)
    #: Receipts of the answers, if the client asked for them or the payload log is on.
    receipts: list[Receipt | Refusal] = field(default_factory=list)
    problem: Problem | None = None
    client_left: bool = False
    #: Bytes that this request has reserved from `Endpoint.bodies`.
    held_bytes: int = 0
    #: Names of the `normalize-prompts` rules that changed the prompt, e.g. "day".
    normalized: tuple[PromptRule, ...] = ()
    spans: list[Span] = field(default_factory=list)
    #: time.perf_counter() at which loading the model had ended and tokenization began.
    loaded_s: float = 0.0
    #: Whether the request waits until the engine has slots for it.
    is_queued: bool = False
    ignored: list[str] = field(default_factory=list)

    def hold(self, n_bytes: int) -> None:
        """Reserve bytes of the body budget until this request ends.

        Raises what `BodyBudget.take` raises.
        """
        self.endpoint.bodies.take(self.caller.turn, n_bytes)
        self.held_bytes += n_bytes

    def ignore(self, names: Iterable[str]) -> None:
        """Add ignored fields to the response header `x-edgeinfer-ignored` and to the log."""
        cleaned = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in names]
        self.ignored = [*self.ignored, *cleaned][:_MAX_IGNORED]
        if self.ignored:
            self.reply_headers["x-edgeinfer-ignored"] = ", ".join(self.ignored)

    @property
    def key(self) -> str:
        """Name of the API key (`Caller.name`). Clients see only stored data of their own key."""
        return self.caller.name

    @property
    def plain_id(self) -> str:
        """The request's id without `req_`, for other ids: `msg_0a1b…` of the request `req_0a1b…`."""
        return self.id.removeprefix("req_")

    @property
    def route(self) -> str:
        """Path pattern for metrics and logs: `/v1/models/{id}`, or `other` for an unknown path."""
        return self.operation.path if self.operation else "other"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        """Return a copy of `request` for the engine, with the fields that depend on the client.

        The copy has normalized messages, the API key's cache salt, and the LoRA adapter that the client
        named in place of a model. If a coding agent begins a conversation with this request, and the
        request has tools, the field `preamble` names the agent.
        """
        lora = ((self.adapter, 1.0),) if self.adapter else None
        is_first = all(turn.role != "assistant" for turn in request.messages)
        agent = agent_of(self.headers.get("user-agent", "")) if request.tools and is_first else ""
        if request.record_tokens or self.endpoint.payload_log is not None:
            request = with_record(request)
        return msgspec.structs.replace(
            request,
            messages=self.normalize(request.messages, stores_prefix=request.cache_prompt),
            cache_salt=self.add_salt(request.cache_salt),
            preamble=agent,
            lora=request.lora if request.lora is not None else lora,
        )

    def normalize(
        self, turns: Sequence[Message], *, stores_prefix: bool = False
    ) -> tuple[Message, ...]:
        """Apply the rules of `normalize-prompts` to a coding agent's turns; return the new turns.

        The rules move or drop lines that change with each request (a date), because such lines end the
        prefix that requests share. Turns of other clients stay as they are. If `stores_prefix`,
        reminders that the agent has removed from earlier turns are restored
        (`prompt_normalization.Reminders`). The response header `x-edgeinfer-normalized` names the rules
        that changed the turns.
        """
        turns, self.normalized = self.endpoint.normalizer.normalize(
            turns,
            self.headers.get("user-agent", ""),
            cache_salt=self.cache_salt if stores_prefix else None,
        )
        if self.normalized:
            self.reply_headers["x-edgeinfer-normalized"] = ", ".join(self.normalized)
        return turns

    def add_salt(self, cache_salt: str) -> str:
        """Combine a request's `cache_salt` with the salt of its API key."""
        return f"{self.cache_salt} {cache_salt}" if self.cache_salt else cache_salt

    def keep_alive_s(self, keep_alive: float | str | None) -> float | None:
        """Convert `keep_alive` to seconds (-1: forever). None means the configured time.

        Only administrators may set the time: for other clients, `keep_alive` is ignored and the result
        is None. Raises InvalidRequestError for a text that is not a duration.
        """
        if keep_alive is None:
            return None
        seconds = keep_alive_s(keep_alive)
        if self.caller.is_admin:
            return seconds
        self.ignore(["keep_alive"])
        return None

    async def acquire(self, keep_alive: float | str | None) -> Lease:
        """Load the model `self.model` if needed; return a lease that keeps it loaded.

        Raises what `self.keep_alive_s` and `ModelPool.acquire` raise.
        """
        lease = await self.endpoint.models.acquire(self.model, self.keep_alive_s(keep_alive))
        self.loaded_s = time.perf_counter()
        self.version = lease.engine.info.version
        return lease

    def name_model(self, name: str | None) -> None:
        """Set `self.model` to the model that the client means by `name`; None means the default model.

        If `name` is a loaded LoRA adapter, `self.adapter` is set, too. If the endpoint has only one
        model, and clients may not pull models, an unknown name means this model. The response header
        `x-edgeinfer-model` has the model's own name if `name` is another. Raises UnknownModelError.
        """
        models = self.endpoint.models
        try:
            self.model = models.resolve(name)
        except UnknownModelError:
            owner = models.owner_of_adapter(name or "")
            model = owner or (models.only_model() if self.endpoint.model_admin is None else None)
            if model is None:
                raise
            self.model, self.adapter = model, (name or "") if owner else ""
        if name is not None and name != self.model:
            self.reply_headers["x-edgeinfer-model"] = self.model

    def first_token(self) -> None:
        self.ttft_s = self.seconds
        self.endpoint.metrics.ttft.labels(self.model, self.version).observe(self.ttft_s)

    def record_generation(self, finished: Finished) -> None:
        """Add a finished generation to the request's totals, trace, metrics and `/slots`."""
        if self.endpoint.traces:
            self.spans += generation_spans(self.loaded_s, finished.timings)
        self.prompt_tokens += finished.usage.prompt_tokens
        self.cached_tokens += finished.usage.cached_tokens
        self.completion_tokens += finished.usage.completion_tokens
        self.outcome = finished.reason
        if finished.divergence.cause != "off":  # "off": the request did not use the prefix cache
            self.endpoint.slots.appendleft((self.key, _slot(self, finished)))
            self.endpoint.host.note_prompt(CacheReport.of(self.model, finished))
        self.endpoint.metrics.generation_ended(self.model, self.version, finished)


def _slot(context: RequestContext, finished: Finished) -> Slot:
    usage, divergence = finished.usage, finished.divergence
    return Slot(
        id_task=context.id,
        model=context.model,
        n_prompt_tokens=usage.prompt_tokens,
        cache_n=usage.cached_tokens,
        cache_disk_n=usage.cached_disk_tokens,
        prompt_n=usage.prompt_tokens - usage.cached_tokens,
        n_decoded=usage.completion_tokens,
        finish_reason=finished.reason,
        n_diverged=divergence.n_tokens,
        cause=divergence.cause,
    )


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response with `value` as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def with_engine(context: RequestContext, body: ModelFields, work: Callable[[Engine], R]) -> R:
    """Load the model that `body` names, then run `work(engine)` in a thread. Raises what both raise."""
    context.name_model(body.model)
    with await context.acquire(body.keep_alive) as lease:
        calls, engine = context.endpoint.engine_calls, lease.engine
        return await asyncio.wrap_future(calls.begin(context.caller.turn, lambda: work(engine)))


def engine_call(
    work: Callable[[RequestContext, B, Engine], R],
) -> Callable[[RequestContext, B], Awaitable[R]]:
    """Make a handler that calls `work` in a thread, with the engine of the model named in the body."""

    @functools.wraps(work)
    async def handler(context: RequestContext, body: B) -> R:
        return await with_engine(context, body, functools.partial(work, context, body))

    return handler
