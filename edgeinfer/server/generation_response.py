"""Respond to a request that generates text: load the model, submit, and send the events.

The response is an event stream or one JSON body. One asyncio task per request waits until the client
disconnects, and then cancels the generations at their next step. Another task of each stream sends
keep-alive comments. Sending a token needs no task, and usually does not even wake the event loop
(docs/decisions/055-send-from-the-decode-thread.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.receipts.receipt import Receipt, Refusal, load_key, make_receipt
from edgeinfer.runtime.chat_format.chat_format import unenforced_fields
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, Finished, Parsed, Progress
from edgeinfer.runtime.interface import Generation
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, check_tools
from edgeinfer.server.connection import Connection, DirectWriter, until_disconnected
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Renderer
from edgeinfer.server.model_pool import Lease
from edgeinfer.server.problems import shutting_down
from edgeinfer.server.tracing import Span
from edgeinfer.server.wire_types import GenerationFields

#: Longest prompt (characters) that is tokenized on the event loop. Tokenizing 1,000 characters takes
#: 0.7 ms, and 16,000 take 16 ms.
_INLINE_CHARACTERS = 1024


B = TypeVar("B", bound=GenerationFields)


class GenerationSpec(msgspec.Struct, frozen=True):
    """The arguments of `answer`: a decoded body, and functions that make requests and a renderer."""

    body: GenerationFields
    make_requests: Callable[[Any, EngineInfo], Sequence[GenerateRequest]]
    make_renderer: Callable[[RequestContext, Any, EngineInfo], Renderer]


class GenerationTask(NamedTuple):
    """Submitted generations, with the lease that keeps their model loaded."""

    lease: Lease
    requests: Sequence[GenerateRequest]
    generations: list[Generation]
    renderer: Renderer


async def start(context: RequestContext, spec: GenerationSpec) -> GenerationTask:
    """Load the model if needed, and submit the generations.

    If the model's process has died, the model is loaded once more. Raises EngineClosedError if the new
    process dies, too. Raises what loading the model and `Engine.submit` raise.
    """
    try:
        return await _start_once(context, spec)
    except EngineClosedError:
        return await _start_once(context, spec)


async def _start_once(context: RequestContext, spec: GenerationSpec) -> GenerationTask:
    began_s = time.perf_counter()
    lease = await context.acquire(spec.body.keep_alive)
    context.spans.append(Span("load", began_s, context.loaded_s))
    try:
        info = lease.engine.info
        if _may_have_files(context.body or b""):  # in a thread: decoding 32 MB of base64 takes 30 ms
            make_requests = functools.partial(spec.make_requests, spec.body, info)
            requests = await _read_files(context, make_requests)
        else:
            requests = spec.make_requests(spec.body, info)
        check_tools(requests[0])
        requests = [context.apply(request) for request in requests]
        if requests[0].tools or any(turn.tool_calls for turn in requests[0].messages):
            context.ignore(await context.endpoint.in_thread(unenforced_fields, requests[0]))
        generations = await submit_all(context, lease, requests)
        renderer = spec.make_renderer(context, spec.body, info)
        return GenerationTask(lease, requests, generations, renderer)
    except BaseException:
        lease.release()
        raise


async def _read_files(
    context: RequestContext, work: Callable[[], Sequence[GenerateRequest]]
) -> Sequence[GenerateRequest]:
    """Call `work`, which decodes files, in a thread; reserve memory for the files' content.

    The `n` answers of a request share this memory. Raises Problem 429 or 503 beyond the limits.
    """
    requests = await context.endpoint.preparation.read_files(context.caller.turn, work)
    first = requests[0]
    files = [*first.pictures, *(file for turn in first.messages for file in turn.pictures)]
    context.hold(first.length + sum(map(len, files)))
    return requests


def _may_have_files(body: bytes) -> bool:
    """Return whether a body may contain a picture or document, in any API and with JSON escapes."""
    markers = (b"image", b"multimodal_data", b"file_data", b'"document"', b"\\u00")
    return any(marker in body for marker in markers)


async def submit_all(
    context: RequestContext, lease: Lease, requests: Sequence[GenerateRequest]
) -> list[Generation]:
    """Wait for slots and submit all requests; if one is refused, cancel the others.

    On success the caller must call `Endpoint.release_generations`. Raises QueueFullError, and what
    `Engine.submit` raises.
    """
    endpoint, engine = context.endpoint, lease.engine
    caller = context.caller.turn
    if requests[0].n_pictures and not engine.info.can_see:
        # the engine refuses pictures, because its model cannot see: submit now, so that the client gets
        # this error without waiting for a slot
        await endpoint.preparation.submit(engine, requests[0], caller)
    generations: list[Generation] = []
    context.is_queued = True
    try:
        async with endpoint.wait_for_slots(context.model, engine.info.n_parallel, requests, caller):
            context.is_queued = False
            for request in requests:
                if lease.in_worker or _is_slow_to_prepare(request):
                    generations.append(await endpoint.preparation.submit(engine, request, caller))
                else:
                    generations.append(engine.submit(request))
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return generations


def _is_slow_to_prepare(request: GenerateRequest) -> bool:
    """Return whether a thread should call `Engine.submit`, although that takes 0.1 ms more."""
    if request.constraint is not None or request.infill is not None:
        return True
    return bool(request.tools or request.n_pictures) or request.length > _INLINE_CHARACTERS


async def events_of(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all generations as they arrive, each with its generation's index."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, generation: Generation) -> None:
        outcome: EdgeInferError | None = None
        try:
            async for event in generation:
                queue.put_nowait((index, event))
        except EdgeInferError as error:
            outcome = error
        finally:
            queue.put_nowait(outcome)

    tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(generations)]
    try:
        n_running = len(tasks)
        while n_running:
            item = await queue.get()
            if item is None:
                n_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def with_receipts(data: bytes, receipts: Sequence[Receipt | Refusal]) -> bytes:
    """Add the field `receipt` (`receipts` for several answers) to the last JSON object in `data`.

    A `Refusal` says why an answer has no receipt. `data` is a JSON body, or the last bytes of a stream:
    `data: {…}` and perhaps `data: [DONE]`.
    """
    field = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
    brace = data.rindex(b"}")
    return b"%b,%b%b" % (data[:brace], msgspec.json.encode(field)[1:-1], data[brace:])


_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def answer(
    context: RequestContext,
    body: B,
    make_requests: Callable[[B, EngineInfo], Sequence[GenerateRequest]],
    make_renderer: Callable[[RequestContext, B, EngineInfo], Renderer],
    *,
    stream: bool,
) -> Response:
    """Return a response that generates the answers to a request and sends them.

    `make_requests(body, info)` and `make_renderer(context, body, info)` are called when the model is
    loaded. Raises Problem and EdgeInferError until the status 200 is sent; later errors end the stream
    as an event.
    """
    endpoint = context.endpoint
    context.name_model(body.model)
    spec = GenerationSpec(body, make_requests, make_renderer)
    is_loaded = endpoint.models.is_loaded(context.model)
    starting = asyncio.ensure_future(start(context, spec))
    if not stream:
        return _WholeResponse(context, spec, starting)
    try:
        await asyncio.wait({starting}, timeout=endpoint.limits.patience_s)
        while is_loaded and not starting.done() and not context.is_queued:
            await asyncio.wait({starting}, timeout=endpoint.limits.patience_s)
    except asyncio.CancelledError:
        starting.cancel()
        raise
    if starting.done():
        starting.result()
    return _StreamResponse(context, spec, starting)


class _GenerationResponse(Response):
    background = None
    task: GenerationTask | None = None
    client_left = False
    _last_token = 0.0

    def __init__(
        self, context: RequestContext, spec: GenerationSpec, starting: asyncio.Future[GenerationTask]
    ) -> None:
        self.context = context
        self.endpoint = context.endpoint
        self._spec = spec
        self._starting = starting

    async def _watch(self, receive: Receive) -> None:
        await until_disconnected(receive)
        self.client_left = self.context.client_left = True
        self._starting.cancel()
        self._cancel()

    def _register(self, task: GenerationTask) -> None:
        self.task = task
        self.endpoint.running.update(task.generations)
        self.context.answers = [CollectedAnswer() for _ in task.generations]
        model = (self.context.model, self.context.version)
        self._between_tokens = self.endpoint.metrics.between_tokens.labels(*model)
        if self.client_left:
            self._cancel()

    def _count(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.context.record_generation(event)
        elif isinstance(event, Parsed):
            now = time.perf_counter()
            if self._last_token:
                self._between_tokens.observe(now - self._last_token)
            else:
                self.context.first_token()
            self._last_token = now

    def _cancel(self) -> None:
        if self.task is not None:
            for generation in self.task.generations:
                generation.cancel()

    def _release(self) -> None:
        starting, context = self._starting, self.context
        if not starting.done():
            starting.cancel()
        elif not starting.cancelled() and starting.exception() is None:
            self.task = starting.result()
        if self.task is not None:
            generations = self.task.generations
            self.endpoint.running.difference_update(generations)
            self.endpoint.release_generations(context.model, len(generations), context.caller.turn)
            self._cancel()
            self.task.lease.release()
            for generation in generations:
                generation.tap(None)  # a tap references this response: the cycle would keep both alive

    def _add_receipts(self, data: bytes) -> bytes:
        """Make the answers' receipts, and add them to `data` if the client requested them."""
        assert self.task is not None
        if not self.task.requests[0].record_tokens:
            return data
        info, key = self.task.lease.engine.info, load_key(self.endpoint.host.config.receipts.key)
        pairs = enumerate(zip(self.task.requests, self.context.answers, strict=True))
        self.context.receipts = receipts = [
            make_receipt(request, answer.finish, info, index=index, key=key)
            for index, (request, answer) in pairs
        ]
        return with_receipts(data, receipts) if self._spec.body.receipt else data

    def _check_cancelled(self, event: Event) -> None:
        """Raise Problem 503 if `event` says that the endpoint's shutdown cancelled the generation."""
        if isinstance(event, Finished) and event.reason == "cancelled" and not self.client_left:
            raise shutting_down()


class _WholeResponse(_GenerationResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            body = await self._work()
        except asyncio.CancelledError:
            if self.client_left:
                return
            raise
        finally:
            watcher.cancel()
            self._release()
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _work(self) -> bytes:
        task = await self._starting
        self._register(task)
        answers = self.context.answers
        if len(answers) == 1:
            task.generations[0].tap(functools.partial(self._collect, answers[0]))
        async with contextlib.aclosing(events_of(task.generations)) as events:
            async for index, event in events:
                self._count(event)
                self._check_cancelled(event)
                answers[index].add(event)
        return self._add_receipts(task.renderer.whole(answers))

    def _collect(self, collected: CollectedAnswer, event: Event) -> bool:
        """Collect an event on the decode thread; return True: the event loop need not wake."""
        self._count(event)
        collected.add(event)
        return True


class _StreamResponse(_GenerationResponse):
    _last_write = 0.0
    _progress: Progress | None = None
    _direct_writer: DirectWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection: Connection | None = scope.get("connection")
        kind = self.context.dialect.stream_type
        start = Response(None, media_type=kind, headers=_STREAM_HEADERS)
        headers = [pair for pair in start.raw_headers if pair[0] != b"content-length"]
        watcher = asyncio.create_task(self._watch(receive))
        ticker = asyncio.create_task(self._send_comments(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._stream(send)
        finally:
            ticker.cancel()
            watcher.cancel()
            self._release()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, send: Send) -> bytes:
        try:
            task = await self._starting
            self._register(task)
            renderer = task.renderer
            unsent = renderer.opening()
            async with contextlib.aclosing(events_of(task.generations)) as events:
                async for index, event in events:
                    self._count(event)
                    self._collect_for_log(index, event)
                    self._check_cancelled(event)
                    if isinstance(event, Progress):
                        self._progress = event
                    data = unsent + renderer.event(index, event)
                    unsent = b""
                    if isinstance(event, Finished):
                        unsent = data  # send these bytes with the closing ones, in one write
                    elif data:
                        self._last_write = time.monotonic()
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        self._use_direct_writer(task)
            return self._add_receipts(unsent + renderer.closing())
        except asyncio.CancelledError:
            if self.client_left:
                return b""
            raise
        except Exception as error:  # noqa: BLE001  the status is sent, so the stream itself must report any failure
            context, info = self.context, EngineInfo(model="")
            if isinstance(error, EdgeInferError):
                message = {"code": error.code, "message": error.message}
                self.endpoint.log.warning("generation-failed", request_id=context.id, **message)
            problem = context.problem = self.endpoint.problem_of(error, context.id)
            context.outcome = problem.code or "error"
            spec = self._spec
            renderer = self.task.renderer if self.task else spec.make_renderer(context, spec.body, info)
            return renderer.failure(problem) or context.dialect.error_events(problem, context.id)
        finally:
            if self._direct_writer is not None:
                self._direct_writer.close()

    def _collect_for_log(self, index: int, event: Event) -> None:
        if self.endpoint.payload_log is not None or isinstance(event, Finished):
            self.context.answers[index].add(event)

    def _use_direct_writer(self, task: GenerationTask) -> None:
        """After the first token, let the decode thread write later ones to the socket, if possible."""
        is_due = self._direct_writer is None and self._last_token and len(task.generations) == 1
        if is_due and self._connection is not None:
            self._direct_writer = self._connection.open_direct_writer(self._render_on_engine_thread)
            task.generations[0].tap(self._direct_writer)

    def _render_on_engine_thread(self, event: Event) -> bytes:
        assert self.task is not None
        self._count(event)
        self._collect_for_log(0, event)
        self._last_write = time.monotonic()
        return self.task.renderer.event(0, event)

    async def _send_comments(self, send: Send) -> None:
        pause_s = self.endpoint.limits.comment_s
        while True:
            await asyncio.sleep(pause_s)
            if time.monotonic() - self._last_write >= pause_s * 0.9:
                if self._direct_writer is not None:
                    self._direct_writer.close()
                comment = self._comment()
                await send({"type": "http.response.body", "body": comment, "more_body": True})

    def _comment(self) -> bytes:
        if self.task is None:
            stage, fraction = self.endpoint.models.stage(self.context.model)
            stage = "queued" if self.context.is_queued else stage
            text = f"{stage} {fraction:.0%}" if fraction is not None else stage or "waiting"
            return self.context.dialect.comment(text)
        progress = self._progress
        if self._last_token:
            return self.task.renderer.waiting("generating")
        if progress is None or progress.queued:
            return self.task.renderer.waiting("queued")
        return self.task.renderer.waiting(f"prefill {progress.done_tokens}/{progress.total_tokens}")
