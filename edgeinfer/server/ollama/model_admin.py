"""Ollama's routes that pull and remove models, where `serve --ollama` allows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response, StreamingResponse

from edgeinfer.errors import InvalidRequestError
from edgeinfer.models.progress import PullProgress
from edgeinfer.server.connection import unless_disconnected
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import RouteTable
from edgeinfer.server.model_pool import ModelAdministrator, spellings
from edgeinfer.server.ollama import wire
from edgeinfer.server.ollama.model_view import find
from edgeinfer.server.ollama.render import error_line
from edgeinfer.server.problems import Problem
from edgeinfer.server.pulling import Reports, reports_of, source_of

ROUTES = RouteTable()

_DONE = wire.OllamaStatus(status="success")


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
    reports = reports_of(lambda report, cancel: admin.pull(text, report, cancel))
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
    except Exception as error:  # noqa: BLE001  the status is already sent: every failure must be told in the stream
        problem = context.endpoint.problem_of(error, context.id)
        context.outcome = problem.code or "error"
        last = error_line(problem, context.id)
    finally:
        await reports.aclose()
    yield last


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
