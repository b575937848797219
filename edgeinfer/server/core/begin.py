"""From a job to running generations: hold the model, submit, and read what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from edgeinfer.agents.table import agent_of
from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.events import Event
from edgeinfer.runtime.interface import Generation
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.core.exchange import Exchange
from edgeinfer.server.core.models.pool import Lease
from edgeinfer.server.core.renderer import Renderer
from edgeinfer.server.observe.metrics import version_of

#: Characters of a prompt tokenized on the event loop at most: 1,000 take 0.7 ms, 16,000 16 ms.
_INLINE_CHARACTERS = 1024


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a route makes of its body. Both functions are called once the model is here."""

    model: str | None
    keep_alive: float | str | None
    stream: bool
    requests: Callable[[EngineInfo], Sequence[GenerateRequest]]
    renderer: Callable[[str, EngineInfo], Renderer]


class Begun:
    """A submitted job: its model, its generations, its renderer."""

    def __init__(self, lease: Lease, generations: list[Generation], renderer: Renderer) -> None:
        self.lease = lease
        self.generations = generations
        self.renderer = renderer


async def begin(exchange: Exchange, job: Job) -> Begun:
    """Hold the model and submit. An engine that turns out to be dead is replaced once.

    Raises EngineClosedError when the second one is dead too, and as holding a model and `submit` do.
    """
    try:
        return await _begin_once(exchange, job)
    except EngineClosedError:
        return await _begin_once(exchange, job)


async def _begin_once(exchange: Exchange, job: Job) -> Begun:
    lease = await exchange.endpoint.models.acquire(exchange.model, exchange.stay_s(job.keep_alive))
    try:
        info = lease.engine.info
        exchange.version = version_of(info.sha256)
        requests = [_shared(exchange, request) for request in job.requests(info)]
        generations = await submit_all(exchange, lease, requests)
        return Begun(lease, generations, job.renderer(exchange.model, info))
    except BaseException as error:
        if isinstance(error, EngineClosedError):
            lease.failed()
        lease.release()
        raise


def _shared(exchange: Exchange, request: GenerateRequest) -> GenerateRequest:
    """Normalize the prompt; share cached prefixes within one API key and one `cache_salt` only."""
    lora = request.lora
    if lora is None and exchange.adapter:
        lora = ((exchange.adapter, 1.0),)
    return msgspec.structs.replace(
        request,
        messages=exchange.settle(request.messages, remembers=request.cache_prompt),
        cache_salt=exchange.salted(request.cache_salt),
        preamble=_preamble(exchange, request),
        lora=lora,
    )


def _preamble(exchange: Exchange, request: GenerateRequest) -> str:
    is_first = all(turn.role != "assistant" for turn in request.messages)
    user_agent = exchange.headers.get("user-agent", "")
    return agent_of(user_agent) if request.tools and is_first else ""


async def submit_all(
    exchange: Exchange, lease: Lease, requests: Sequence[GenerateRequest]
) -> list[Generation]:
    """Submit all or none: when one is refused, those before it are cancelled.

    They count in the model's queue until `_leave`.
    """
    endpoint, engine = exchange.endpoint, lease.engine
    endpoint.queue(exchange.model, engine.info.n_parallel, len(requests))
    generations: list[Generation] = []
    try:
        for request in requests:
            if lease.in_worker or _heavy(request):
                generations.append(await endpoint.preparation.submit(engine, request))
            else:
                generations.append(engine.submit(request))
    except BaseException:
        for generation in generations:
            generation.cancel()
        endpoint.unqueue(exchange.model, len(requests))
        raise
    return generations


def _heavy(request: GenerateRequest) -> bool:
    """Whether validating it takes longer than a hop to a thread (about 0.1 ms)."""
    if request.constraint is not None or request.tools or request.infill is not None:
        return True
    return request.length > _INLINE_CHARACTERS


async def events_of(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield events of all generations as they come, with the generation's index."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_feed(queue, index, generation))
        for index, generation in enumerate(generations)
    ]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None], index: int, generation: Generation
) -> None:
    outcome: EdgeInferError | None = None
    try:
        async for event in generation:
            queue.put_nowait((index, event))
    except EdgeInferError as error:
        outcome = error
    finally:
        queue.put_nowait(outcome)
