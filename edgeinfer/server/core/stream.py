"""From a begun job to an answer: send what the engine says, streamed or whole.

One request costs one task for its disconnect and, when streamed, one for its keep-alive comments; a
token costs no task, and where it can it does not wake the event loop
(docs/decisions/055-past-the-event-loop.md). A client that leaves cancels its generations at their next
step, wherever they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.events import Event, Finished, Progress, Timings, Usage
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.server.core.begin import Begun, Job, begin, events_of
from edgeinfer.server.core.connection import Connection, ShortCut, disconnected
from edgeinfer.server.core.exchange import Exchange
from edgeinfer.server.core.problems import Problem, from_error, internal, shutting_down
from edgeinfer.server.observe.metrics import TokenClock

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def answer(exchange: Exchange, job: Job) -> Response:
    """Begin a job and give its response, whole or streamed.

    Raises Problem and EdgeInferError before the status is sent, then fails in the stream.
    """
    endpoint = exchange.endpoint
    exchange.name_model(job.model)
    if not job.stream:
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
