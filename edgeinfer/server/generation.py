"""From a job to running generations: hold the model, submit, and read what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.agents.table import agent_of
from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.events import Event, Finished, Progress, Timings, Usage
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.interface import Generation
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.connection import Connection, ShortCut, disconnected
from edgeinfer.server.context import Exchange
from edgeinfer.server.dialect import Renderer
from edgeinfer.server.metrics import TokenClock, version_of
from edgeinfer.server.model_pool import Lease
from edgeinfer.server.problems import Problem, from_error, internal, shutting_down

#: Characters of a prompt tokenized on the event loop at most: 1,000 take 0.7 ms, 16,000 16 ms.
_INLINE_CHARACTERS = 1024


class GenerationBody(Protocol):
    """A request's body, as far as the model and its stay are concerned."""

    @property
    def model(self) -> str | None: ...

    @property
    def keep_alive(self) -> float | str | None: ...


class Job(msgspec.Struct, frozen=True):
    """What a route makes of its body. Both functions are called once the model is here."""

    keep_alive: float | str | None
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
        messages=exchange.normalize(request.messages, stores_prefix=request.cache_prompt),
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


_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def answer(
    exchange: Exchange,
    body: GenerationBody,
    requests: Callable[[EngineInfo], Sequence[GenerateRequest]],
    renderer: Callable[[str, EngineInfo], Renderer],
    *,
    stream: bool,
) -> Response:
    """Generate the answers to `requests`, whole or streamed, in the shape of `renderer`.

    Raises Problem and EdgeInferError before the status is sent, then fails in the stream.
    """
    endpoint = exchange.endpoint
    exchange.name_model(body.model)
    job = Job(body.keep_alive, requests, renderer)
    if not stream:
        return _WholeResponse(exchange, job)
    opening: asyncio.Future[Begun]
    if endpoint.models.is_loaded(exchange.model):
        opening = asyncio.get_running_loop().create_future()
        opening.set_result(await begin(exchange, job))
        return _StreamResponse(exchange, opening, job)
    opening = asyncio.ensure_future(begin(exchange, job))
    try:
        await asyncio.wait({opening}, timeout=endpoint.limits.patience_s)
    except asyncio.CancelledError:
        opening.cancel()
        raise
    if opening.done():
        opening.result()
    return _StreamResponse(exchange, opening, job)


class _Answering:
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.endpoint = exchange.endpoint
        self.begun: Begun | None = None
        self.gone = False
        self._last_token = 0.0
        self._clock: TokenClock | None = None

    def _take(self, begun: Begun) -> None:
        self.begun = begun
        self.endpoint.running.update(begun.generations)
        self._clock = self.endpoint.metrics.clock(self.exchange.model, self.exchange.version)
        if self.gone:
            self._cancel()

    def _count(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.exchange.ended(event)
        elif not isinstance(event, Progress):
            now = time.perf_counter()
            if self._last_token:
                assert self._clock is not None
                self._clock.observe(now - self._last_token)
            else:
                self.exchange.first_token()
            self._last_token = now

    def _cancel(self) -> None:
        if self.begun is not None:
            for generation in self.begun.generations:
                generation.cancel()

    def _leave(self) -> None:
        if self.begun is not None:
            self.endpoint.running.difference_update(self.begun.generations)
            self.endpoint.unqueue(self.exchange.model, len(self.begun.generations))
            self._cancel()
            self.begun.lease.release()

    def _check_cancelled(self, event: Event) -> None:
        """A generation that we cancelled ourselves is a failure to its client, not an answer."""
        if isinstance(event, Finished) and event.reason == "cancelled" and not self.gone:
            raise shutting_down()

    def _problem(self, error: Exception) -> Problem:
        if isinstance(error, Problem):
            return error
        if isinstance(error, EngineClosedError) and self.begun is not None:
            self.begun.lease.failed()
        if isinstance(error, EdgeInferError):
            self.endpoint.log.warning(
                "generation-failed", request_id=self.exchange.id, code=error.code, message=error.message
            )
            return from_error(error)
        self.endpoint.log.error("internal", error, request_id=self.exchange.id)
        return internal(self.exchange.id)


class _WholeResponse(_Answering, Response):
    def __init__(self, exchange: Exchange, job: Job) -> None:
        _Answering.__init__(self, exchange)
        self._job = job
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work())
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.gone = True
                self._cancel()
                if self.begun is None:
                    work.cancel()
            body = await work
        except asyncio.CancelledError:
            work.cancel()
            if self.gone:
                return
            raise
        finally:
            watcher.cancel()
            self._leave()
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _work(self) -> bytes:
        self._take(await begin(self.exchange, self._job))
        assert self.begun is not None
        answers = [Collected() for _ in self.begun.generations]
        if len(answers) == 1:
            self.begun.generations[0].tap(functools.partial(self._collect, answers[0]))
        try:
            async with contextlib.aclosing(events_of(self.begun.generations)) as events:
                async for index, event in events:
                    self._count(event)
                    self._check_cancelled(event)
                    answers[index].add(event)
        except EngineClosedError:
            self.begun.lease.failed()
            raise
        body = self.begun.renderer.whole(answers)
        self.exchange.answer = body
        return body

    def _collect(self, collected: Collected, event: Event) -> bool:
        """Take an event on the thread that made it: nobody need wake before the last."""
        self._count(event)
        collected.add(event)
        return True


class _StreamResponse(_Answering, Response):
    def __init__(self, exchange: Exchange, opening: asyncio.Future[Begun], job: Job) -> None:
        _Answering.__init__(self, exchange)
        self._opening = opening
        self._job = job
        self._last_write = 0.0
        self._progress: Progress | None = None
        self._texts: list[Collected] | None = None
        self._short_cut: ShortCut | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection: Connection | None = scope.get("connection")
        kind = self.exchange.dialect.stream_type
        start = Response(None, media_type=kind, headers=_STREAM_HEADERS)
        headers = [pair for pair in start.raw_headers if pair[0] != b"content-length"]
        watcher = asyncio.create_task(self._watch(receive))
        ticker = asyncio.create_task(self._tick(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._stream(send)
            ticker.cancel()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            ticker.cancel()
            watcher.cancel()
            if not self._opening.done():
                self._opening.cancel()
            elif (
                self.begun is None
                and not self._opening.cancelled()
                and self._opening.exception() is None
            ):
                self.begun = self._opening.result()
            self._leave()

    async def _stream(self, send: Send) -> bytes:
        try:
            begun = await self._opening
            self._take(begun)
            renderer = begun.renderer
            if self.endpoint.payloads is not None:
                self._texts = [Collected() for _ in begun.generations]
            held = renderer.opening()
            async with contextlib.aclosing(events_of(begun.generations)) as events:
                async for index, event in events:
                    self._count(event)
                    self._check_cancelled(event)
                    if isinstance(event, Progress):
                        self._progress = event
                    data = held + renderer.event(index, event)
                    held = b""
                    if isinstance(event, Finished):
                        held = data  # goes out with what follows it
                    elif data:
                        self._last_write = time.monotonic()
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        self._pass_by(begun)
                    if self._texts is not None:
                        self._texts[index].add(event)
            return held + renderer.closing()
        except asyncio.CancelledError:
            if self.gone:
                return b""
            raise
        except Exception as error:  # noqa: BLE001  the status is already sent: every failure must be told in the stream
            problem = self._problem(error)
            self.exchange.how = problem.code or "error"
            renderer = (
                self.begun.renderer
                if self.begun
                else self._job.renderer(self.exchange.model, EngineInfo(model=""))
            )
            return renderer.failure(problem, self.exchange.id)
        finally:
            self._keep_answer()
            if self._short_cut is not None:
                self._short_cut.close()

    def _pass_by(self, begun: Begun) -> None:
        """Have tokens sent by the thread that makes them, after the first, where possible."""
        alone = len(begun.generations) == 1 and self._texts is None
        if self._short_cut is None and self._last_token and alone and self._connection is not None:
            self._short_cut = self._connection.short_cut(self._passing)
            begun.generations[0].tap(self._short_cut)

    def _passing(self, event: Event) -> bytes:
        assert self.begun is not None
        self._count(event)
        self._last_write = time.monotonic()
        return self.begun.renderer.event(0, event)

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self.gone = True
        self._opening.cancel()
        self._cancel()

    async def _tick(self, send: Send) -> None:
        pause_s = self.endpoint.limits.comment_s
        while True:
            await asyncio.sleep(pause_s)
            if time.monotonic() - self._last_write >= pause_s * 0.9:
                if self._short_cut is not None:
                    self._short_cut.close()
                said = self._said()
                await send({"type": "http.response.body", "body": said, "more_body": True})

    def _said(self) -> bytes:
        if self.begun is None:
            stage, fraction = self.endpoint.models.stage(self.exchange.model)
            said = f"{stage} {fraction:.0%}" if fraction is not None else stage or "waiting"
            return self.exchange.dialect.comment(said)
        seen = self._progress
        if seen is None or seen.queued:
            return self.begun.renderer.waiting("queued")
        return self.begun.renderer.waiting(f"prefill {seen.done_tokens}/{seen.total_tokens}")

    def _keep_answer(self) -> None:
        """What was said, as the same request would have been answered whole; for the payload log."""
        if self._texts is None or self.begun is None:
            return
        cut_short = Finished(reason="cancelled", usage=Usage(), timings=Timings())
        for said in self._texts:
            said.end = said.end or cut_short
        renderer = self._job.renderer(self.exchange.model, self.begun.lease.engine.info)
        self.exchange.answer = renderer.whole(self._texts)
