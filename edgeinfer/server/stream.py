"""From a job to an answer: hold the model, submit, and send what the engine says, streamed or whole.

One request costs one task for its disconnect and, when streamed, one for its keep-alive comments; a token costs no task. A
client that leaves cancels its generations at their next step, wherever they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.events import Event, Finished, Progress
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.answer import Answer, Renderer
from edgeinfer.server.endpoint import Endpoint, Exchange
from edgeinfer.server.metrics import TokenClock, version_of
from edgeinfer.server.models import Lease
from edgeinfer.server.problems import Problem, from_error, internal

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
#: A prompt beyond this many characters is tokenized beside the event loop: 1,000 take 0.7 ms, 16,000 take 16 ms.
_INLINE_CHARACTERS = 1024


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a route makes of its body. Both functions are called once the model is here."""

    model: str | None
    keep_alive_s: float | None
    stream: bool
    requests: Callable[[EngineInfo], Sequence[GenerateRequest]]
    renderer: Callable[[str, EngineInfo], Renderer]


class Begun:
    """A submitted job: its model, its generations, its renderer."""

    def __init__(self, lease: Lease, generations: list[Generation], renderer: Renderer) -> None:
        self.lease = lease
        self.generations = generations
        self.renderer = renderer


async def answer(exchange: Exchange, job: Job) -> Response:
    """Raises Problem and EdgeInferError while the status can still say so; later failures are in the stream."""
    endpoint = exchange.endpoint
    exchange.model = endpoint.models.resolve(job.model)
    if not job.stream:
        return _WholeResponse(exchange, job)
    opening: asyncio.Future[Begun]
    if endpoint.models.is_loaded(exchange.model):
        opening = asyncio.get_running_loop().create_future()
        opening.set_result(await begin(exchange, job))
        return _SseResponse(exchange, opening, job)
    opening = asyncio.ensure_future(begin(exchange, job))
    try:
        await asyncio.wait({opening}, timeout=endpoint.limits.patience_s)
    except asyncio.CancelledError:
        opening.cancel()
        raise
    if opening.done():
        opening.result()
    return _SseResponse(exchange, opening, job)


async def begin(exchange: Exchange, job: Job) -> Begun:
    """Hold the model and submit. An engine that turns out to be dead is replaced once."""
    models = exchange.endpoint.models
    for attempt in (1, 2):
        lease = await models.acquire(exchange.model, job.keep_alive_s)
        try:
            info = lease.engine.info
            exchange.version = version_of(info.sha256)
            generations = await submit_all(exchange, lease, job.requests(info))
            return Begun(lease, generations, job.renderer(exchange.model, info))
        except EngineClosedError:
            lease.failed()
            lease.release()
            if attempt == 2:
                raise
        except BaseException:
            lease.release()
            raise
    raise AssertionError("unreachable")


async def submit_all(exchange: Exchange, lease: Lease, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """All or none: when one is refused, those before it are cancelled. They count in the model's queue until `_leave`."""
    endpoint, engine = exchange.endpoint, lease.engine
    endpoint.queue(exchange.model, engine.info.n_parallel, len(requests))
    generations: list[Generation] = []
    try:
        for request in requests:
            if lease.in_worker or _heavy(request):
                generations.append(await _submit_beside(endpoint, engine, request))
            else:
                generations.append(engine.submit(request))
    except BaseException:
        for generation in generations:
            generation.cancel()
        endpoint.unqueue(exchange.model, len(requests))
        raise
    return generations


async def _submit_beside(endpoint: Endpoint, engine: Engine, request: GenerateRequest) -> Generation:
    """Submit in a thread. A client that leaves meanwhile does not leave the generation running."""
    submitting = asyncio.get_running_loop().run_in_executor(endpoint.threads, engine.submit, request)
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel_late)
        raise


def _cancel_late(submitting: asyncio.Future[Generation]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _heavy(request: GenerateRequest) -> bool:
    """Whether validating it takes longer than a hop to a thread (about 0.1 ms)."""
    if request.constraint is not None or request.tools:
        return True
    prompt = request.prompt
    length = sum(len(turn.content) for turn in request.messages) + (len(prompt) if prompt is not None else 0)
    return length > _INLINE_CHARACTERS


async def events_of(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all generations as they come, with the generation's index. One task a generation when there are several."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(queue, index, generation)) for index, generation in enumerate(generations)]
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


async def _feed(queue: asyncio.Queue[tuple[int, Event] | BaseException | None], index: int, generation: Generation) -> None:
    outcome: EdgeInferError | None = None
    try:
        async for event in generation:
            queue.put_nowait((index, event))
    except EdgeInferError as error:
        outcome = error
    finally:
        queue.put_nowait(outcome)


class _Answering:
    """What streamed and whole answers share: the clock, the leave-taking, the disconnect."""

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
        """Clock the event."""
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
            raise Problem(503, "The endpoint is shutting down.", kind="server_error", code="shutting_down", retry_after_s=2)

    def _problem(self, error: Exception) -> Problem:
        """What to tell the client of a failure."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, EngineClosedError) and self.begun is not None:
            self.begun.lease.failed()
        if isinstance(error, EdgeInferError):
            self.endpoint.log.warning("generation-failed", request_id=self.exchange.id, code=error.code, message=error.message)
            return from_error(error)
        self.endpoint.log.error("internal", error, request_id=self.exchange.id)
        return internal(self.exchange.id)


class _WholeResponse(_Answering, Response):
    """A JSON answer; nothing is sent before it is complete."""

    def __init__(self, exchange: Exchange, job: Job) -> None:
        _Answering.__init__(self, exchange)
        self._job = job
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work())
        watcher = asyncio.ensure_future(_disconnected(receive))
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
        answers = [Answer() for _ in self.begun.generations]
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
        if self.endpoint.payloads is not None:
            self.exchange.payload(msgspec.json.decode(body))
        return body


class _SseResponse(_Answering, Response):
    """A stream of server-sent events."""

    def __init__(self, exchange: Exchange, opening: asyncio.Future[Begun], job: Job) -> None:
        _Answering.__init__(self, exchange)
        self._opening = opening
        self._job = job
        self._last_write = 0.0
        self._progress: Progress | None = None
        self._texts: list[Answer] | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = Response(None, media_type="text/event-stream", headers=_SSE_HEADERS)
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
            elif self.begun is None and not self._opening.cancelled() and self._opening.exception() is None:
                self.begun = self._opening.result()
            self._leave()

    async def _stream(self, send: Send) -> bytes:
        """Send everything but the last bytes, which are returned."""
        try:
            begun = await self._opening
            self._take(begun)
            renderer = begun.renderer
            if self.endpoint.payloads is not None:
                self._texts = [Answer() for _ in begun.generations]
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
                    if self._texts is not None:
                        self._texts[index].add(event)
            self._write_payload()
            return held + renderer.closing()
        except asyncio.CancelledError:
            if self.gone:
                return b""
            raise
        except Exception as error:  # noqa: BLE001  the status is already sent: every failure must be told in the stream
            problem = self._problem(error)
            self.exchange.how = problem.code or "error"
            renderer = self.begun.renderer if self.begun else self._job.renderer(self.exchange.model, EngineInfo(model=""))
            return renderer.failure(problem, self.exchange.id)

    async def _watch(self, receive: Receive) -> None:
        await _disconnected(receive)
        self.gone = True
        self._opening.cancel()
        self._cancel()

    async def _tick(self, send: Send) -> None:
        """A comment whenever nothing was said for a while."""
        pause_s = self.endpoint.limits.comment_s
        while True:
            await asyncio.sleep(pause_s)
            if time.monotonic() - self._last_write >= pause_s * 0.9:
                comment = self._said()
                await send({"type": "http.response.body", "body": comment, "more_body": True})

    def _said(self) -> bytes:
        if self.begun is None:
            stage, fraction = self.endpoint.models.stage(self.exchange.model)
            said = f"{stage} {fraction:.0%}" if fraction is not None else stage or "waiting"
            return f": {said}\n\n".encode()
        seen = self._progress
        if seen is None or seen.queued:
            return self.begun.renderer.comment("queued")
        return self.begun.renderer.comment(f"prefill {seen.done_tokens}/{seen.total_tokens}")

    def _write_payload(self) -> None:
        if self._texts is not None:
            said = [
                {"text": a.text, "reasoning": a.reasoning, "calls": [c.arguments for c in a.calls.values()]}
                for a in self._texts
            ]
            self.exchange.payload(said)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
