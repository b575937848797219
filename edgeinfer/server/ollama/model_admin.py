"""Ollama's routes that pull and remove models, where `serve --ollama` allows it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable

import msgspec
from starlette.responses import Response, StreamingResponse

from edgeinfer.errors import EdgeInferError, InvalidRequestError, UnknownModelError, UsageError
from edgeinfer.models import names, sources
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import OnProgress, PullProgress
from edgeinfer.server.connection import unless_disconnected
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import RouteTable
from edgeinfer.server.model_pool import LATEST, ModelAdministrator, spellings
from edgeinfer.server.ollama import wire
from edgeinfer.server.ollama.model_view import find
from edgeinfer.server.ollama.render import error_line
from edgeinfer.server.problems import Problem, from_error, internal

ROUTES = RouteTable()

#: How Ollama writes repositories of Hugging Face.
_HUBS = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
_DONE = wire.OllamaStatus(status="success")
Work = Callable[[OnProgress, threading.Event], None]
Reports = AsyncGenerator[PullProgress, None]


def _admin_of(context: RequestContext) -> ModelAdministrator:
    admin = context.endpoint.model_admin
    if admin is None:
        raise Problem(
            403,
            "Models are pulled and removed over HTTP only where the endpoint was started with "
            "`edgeinfer serve --ollama`.",
            code="models_are_fixed",
        )
    return admin


@ROUTES.post("/api/pull", reply=wire.OllamaStatus, streams=True, is_admin=True)
async def pull(context: RequestContext, body: wire.OllamaPullRequest) -> Response:
    """Fetch a model; a line a report."""
    admin, text = _admin_of(context), source_of(body.named())
    reports = _reports_of(lambda report, cancel: admin.pull(text, report, cancel))
    first = await anext(reports, None)  # what fails until here has a status of its own
    if body.stream is False:
        await unless_disconnected(context.request.receive, _drain(reports))
        return json_reply(_DONE)
    return StreamingResponse(_lines(context, first, reports), media_type="application/x-ndjson")


async def _drain(reports: Reports) -> None:
    async for _ in reports:
        pass


async def _lines(
    context: RequestContext, first: PullProgress | None, reports: Reports
) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield msgspec.json.encode(progress_line(first)) + b"\n"
        async for report in reports:
            yield msgspec.json.encode(progress_line(report)) + b"\n"
        last = msgspec.json.encode(_DONE) + b"\n"
    except EdgeInferError as error:
        last = _error_line(context, from_error(error))
    except Exception as error:  # noqa: BLE001  the status is already sent: every failure must be told in the stream
        context.endpoint.log.error("internal", error, request_id=context.id)
        last = _error_line(context, internal(context.id))
    finally:
        await reports.aclose()
    yield last


def _error_line(context: RequestContext, problem: Problem) -> bytes:
    context.outcome = problem.code or "error"
    return error_line(problem, context.id)


async def _reports_of(work: Work) -> Reports:
    """Do `work` in a thread and yield its reports. Raises what it raises; closed early, it ends it."""
    loop = asyncio.get_running_loop()
    reports: asyncio.Queue[PullProgress | Exception | None] = asyncio.Queue()
    cancel = threading.Event()

    def report(now: PullProgress | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, with its clients
            loop.call_soon_threadsafe(reports.put_nowait, now)

    def run() -> None:
        outcome: Exception | None = None
        try:
            work(report, cancel)
        except Exception as error:  # noqa: BLE001  the thread's end: a waiting client must get it
            outcome = error
        report(outcome)

    threading.Thread(target=run, name="models", daemon=True).start()
    try:
        while (now := await reports.get()) is not None:
            if isinstance(now, Exception):
                raise now
            yield now
    finally:
        cancel.set()


def source_of(name: str) -> str:
    """Return a catalogue name or a Hugging Face repository. Raises InvalidRequestError.

    Clients may not make the endpoint read files of this machine or ask other servers.
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
        "model: a name of the catalogue, or hf.co/OWNER/REPOSITORY:QUANTIZATION; files are for "
        "`edgeinfer pull`",
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


@ROUTES.delete("/api/delete", is_admin=True)
async def delete(context: RequestContext, body: wire.OllamaDeleteRequest) -> wire.OllamaStatus:
    """Remove a model."""
    admin, name = _admin_of(context), body.named()
    model = await find(context, name)
    if model.name not in spellings(name):
        raise InvalidRequestError(f"model: {name} is another name of {model.name}", param="model")
    await context.endpoint.models.unload(model.name)
    await context.endpoint.in_thread(admin.remove, model.name)
    return _DONE


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
