"""Ollama's routes that change which models are here, where `serve --ollama` allows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edgeinfer.errors import EdgeInferError, InvalidRequestError, UnknownModelError, UsageError
from edgeinfer.models import names, sources
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import OnProgress, PullProgress
from edgeinfer.server.connection import disconnected
from edgeinfer.server.context import RequestContext, context_of
from edgeinfer.server.dialect import RouteTable
from edgeinfer.server.model_pool import LATEST, ModelAdministrator, spellings
from edgeinfer.server.ollama import wire
from edgeinfer.server.ollama.model_view import find, named
from edgeinfer.server.ollama.render import error_line
from edgeinfer.server.problems import Problem, from_error, internal
from edgeinfer.server.request_body import decode

ROUTES = RouteTable()

#: How Ollama writes repositories of Hugging Face.
_HUBS = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
Work = Callable[[OnProgress, threading.Event], None]


def _admin_of(context: RequestContext) -> ModelAdministrator:
    admin = context.endpoint.model_admin
    if admin is None:
        raise Problem(
            403,
            "Models are pulled, made and removed over HTTP only where the endpoint was started with "
            "`edgeinfer serve --ollama`.",
            kind="permission_error",
            code="models_are_fixed",
        )
    return admin


@ROUTES.post(
    "/api/pull", body=wire.OllamaPullRequest, reply=wire.OllamaStatus, streams=True, is_admin=True
)
async def pull(request: Request) -> Response:
    """Fetch a model; a line a report."""
    context = context_of(request)
    body = await decode(request, wire.OllamaPullRequest)
    admin, text = _admin_of(context), source_of(named(body.model, body.name))
    work = _ModelJob(context, lambda report, cancel: admin.pull(text, report, cancel))
    return await work.started(stream=body.stream is not False)


def source_of(name: str) -> str:
    """Return a catalogue name or a Hugging Face repository. Raises InvalidRequestError.

    Neither files of this machine nor other servers: who may speak to the endpoint may not make it look
    at those.
    """
    plain = name.removesuffix(LATEST)
    hub = next((hub for hub in _HUBS if plain.startswith(hub)), "")
    plain = f"hf:{plain.removeprefix(hub)}" if hub else plain
    if not (names.is_path(plain) or sources.looks_like_source(plain)):
        _refuse_sizes(plain)
        return plain
    with contextlib.suppress(UsageError):
        if isinstance(sources.parse(plain), sources.HubFile | sources.HubQuant):
            return plain
    raise InvalidRequestError(
        "model: a name of the catalogue, or hf.co/OWNER/REPOSITORY:QUANTIZATION; /api/create takes a "
        "file",
        param="model",
    )


def _refuse_sizes(name: str) -> None:
    """Raise UnknownModelError for `llama3.2:3b`: a tag is a quantization, sizes are in names."""
    base, colon, tag = name.partition(":")
    if not colon or "/" in name or file_type(tag) is not None:
        return
    from edgeinfer.models.catalog import load_catalog, nearest  # 8 ms, for a name that is not here

    hint = nearest(f"{base}-{tag}", load_catalog().models)
    raise UnknownModelError(f"no model is called {name!r}", hint=hint)


@ROUTES.post(
    "/api/create", body=wire.OllamaCreateRequest, reply=wire.OllamaStatus, streams=True, is_admin=True
)
async def create(request: Request) -> Response:
    """Name a GGUF file of this machine, which stays where it is, or a model once more."""
    context = context_of(request)
    body = await decode(request, wire.OllamaCreateRequest)
    admin, name = _admin_of(context), named(body.model, body.name).removesuffix(LATEST)
    source = body.from_ or ""
    if not source.endswith(".gguf"):
        model = await find(context, source)
        await context.endpoint.in_thread(admin.copy, model.name, name)
        return _done(context, stream=body.stream is not False)
    if not os.path.isabs(source):
        raise InvalidRequestError("from: a file's whole path", param="from")
    work = _ModelJob(context, lambda report, cancel: admin.create(name, source, report, cancel))
    return await work.started(stream=body.stream is not False)


@ROUTES.post(
    "/api/copy", body=wire.OllamaCopyRequest, reply=wire.OllamaStatus, uses_model=False, is_admin=True
)
async def copy(request: Request) -> Response:
    """Give a model another name beside its own."""
    context = context_of(request)
    body = await decode(request, wire.OllamaCopyRequest)
    admin = _admin_of(context)
    model = await find(context, body.source)
    name = body.destination.removesuffix(LATEST)
    await context.endpoint.in_thread(admin.copy, model.name, name)
    return _done(context, stream=False)


@ROUTES.delete("/api/delete", body=wire.OllamaDeleteRequest, reply=wire.OllamaStatus, is_admin=True)
async def delete(request: Request) -> Response:
    """Remove a model."""
    context = context_of(request)
    body = await decode(request, wire.OllamaDeleteRequest)
    admin, name = _admin_of(context), named(body.model, body.name)
    model = await find(context, name)
    if model.name not in spellings(name):
        raise InvalidRequestError(f"model: {name} is another name of {model.name}", param="model")
    await context.endpoint.models.unload(model.name)
    await context.endpoint.in_thread(admin.remove, model.name)
    return _done(context, stream=False)


@ROUTES.post("/api/push", reply=wire.OllamaStatus, uses_model=False)
async def push(request: Request) -> Response:
    """Refused: nothing is pushed from here."""
    raise Problem(400, "Models are not pushed from here.", code="not_supported")


@ROUTES.post("/api/blobs/{id}", reply=wire.OllamaStatus, uses_model=False)
async def blob(request: Request) -> Response:
    """Refused: files are not uploaded here."""
    raise Problem(
        400,
        "Files are not uploaded here; /api/create takes the path of a file on this machine in `from`.",
        code="not_supported",
    )


def _done(context: RequestContext, *, stream: bool) -> Response:
    context.answer = wire.OllamaStatus(status="success")
    line = msgspec.json.encode(context.answer)
    if stream:
        return Response(line + b"\n", media_type="application/x-ndjson")
    return Response(line, media_type="application/json")


def progress_line(now: PullProgress) -> wire.OllamaStatus:
    """Convert a progress report; clients draw a bar for each `digest`."""
    if now.note:
        return wire.OllamaStatus(status=now.note)
    match now.stage:
        case "downloading" | "copying":
            return wire.OllamaStatus(
                status=f"pulling {now.file}",
                digest=now.file,
                total=now.total_bytes or 0,
                completed=now.done_bytes,
            )
        case "verifying":
            return wire.OllamaStatus(status="verifying sha256 digest")
        case "converting" | "quantizing" | "weighing" | "scoring":
            return wire.OllamaStatus(
                status=now.stage, total=now.total_bytes or 0, completed=now.done_bytes
            )
        case "done":
            return wire.OllamaStatus(status="writing manifest")
    return wire.OllamaStatus(status="pulling manifest")


class _ModelJob(Response):
    """Work in a thread. A client that leaves ends it; what was fetched is kept."""

    def __init__(self, context: RequestContext, work: Work) -> None:
        self._context = context
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._reports: asyncio.Queue[PullProgress | Exception | None] = asyncio.Queue()
        self._cancel = threading.Event()
        self._first: PullProgress | None = None
        self._stream = True
        self.background = None

    async def started(self, *, stream: bool) -> Response:
        """Start the work and wait for its first report. Raises what the work raises before that."""
        self._stream = stream
        threading.Thread(target=self._run, name="models", daemon=True).start()
        try:
            first = await self._reports.get()
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if isinstance(first, Exception):
            raise first
        self._first = first
        return self if first is not None else _done(self._context, stream=stream)

    def _run(self) -> None:
        outcome: Exception | None = None
        try:
            self._work(self._report, self._cancel)
        except Exception as error:  # noqa: BLE001  the thread's end: whoever waits must be told
            outcome = error
        self._report(outcome)

    def _report(self, report: PullProgress | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._stream:
                await self._send_lines(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            watcher.cancel()
            self._cancel.set()

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._cancel.set()

    async def _send_lines(self, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        report: PullProgress | Exception | None = self._first
        while isinstance(report, PullProgress):
            await send(_body(msgspec.json.encode(progress_line(report)) + b"\n", more=True))
            report = await self._reports.get()
        await send(_body(self._last_line(report), more=False))

    def _last_line(self, error: Exception | None) -> bytes:
        if error is None:
            self._context.answer = wire.OllamaStatus(status="success")
            return msgspec.json.encode(self._context.answer) + b"\n"
        problem = self._problem(error)
        self._context.outcome = problem.code or "error"
        self._context.answer = wire.OllamaError(error=problem.message)
        return error_line(problem, self._context.id)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        report: PullProgress | Exception | None = self._first
        while isinstance(report, PullProgress):
            report = await self._reports.get()
        if report is not None:
            raise report
        await _done(self._context, stream=False)(scope, receive, send)

    def _problem(self, error: Exception) -> Problem:
        if isinstance(error, EdgeInferError):
            return from_error(error)
        self._context.endpoint.log.error("internal", error, request_id=self._context.id)
        return internal(self._context.id)


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
