"""Ollama's routes. Clients may pull and delete models only with `edgeinfer serve --ollama`."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from starlette.responses import Response, StreamingResponse

from edgeinfer import __version__
from edgeinfer.errors import InvalidRequestError
from edgeinfer.models import lookup
from edgeinfer.models.progress import PullProgress
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.connection import unless, until_disconnected
from edgeinfer.server.context import RequestContext, engine_call, json_reply
from edgeinfer.server.dialect import Dialect, RouteTable, stamp
from edgeinfer.server.generation_response import answer
from edgeinfer.server.model_names import ollama_name
from edgeinfer.server.model_pool import AvailableModel, LoadedReply, ModelAdministrator
from edgeinfer.server.ollama import render, translate, wire
from edgeinfer.server.problems import Problem
from edgeinfer.server.pulling import Reports, reports_of, source_of

ROUTES = RouteTable()

#: Version of Ollama whose API this is. Clients refuse to use old versions.
API_VERSION = "0.13.4"
#: `expires_at` (s from now) of a model that is never unloaded, as Ollama reports it.
_FOR_EVER_S = 100 * 365 * 86_400.0


@ROUTES.post("/api/chat", reply=wire.OllamaChatReply, streams=True)
async def chat(context: RequestContext, body: wire.OllamaChatRequest) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return await _load_or_unload(context, body, is_chat=True)
    return await _answer(context, body, lambda info: translate.chat(body, info), is_chat=True)


@ROUTES.post("/api/generate", reply=wire.OllamaGenerateReply, streams=True)
async def generate(context: RequestContext, body: wire.OllamaGenerateRequest) -> Response:
    """Answer a prompt, continue a raw prompt, or write the text before a suffix."""
    if not (body.prompt or body.suffix):
        return await _load_or_unload(context, body, is_chat=False)
    return await _answer(context, body, lambda info: translate.generate(body, info), is_chat=False)


async def _answer(
    context: RequestContext,
    body: wire.OllamaFields,
    request: Callable[[EngineInfo], GenerateRequest],
    *,
    is_chat: bool,
) -> Response:
    def requests(info: EngineInfo) -> list[GenerateRequest]:
        context.ignore(translate.ignored_num_ctx(body.options, info))
        return [request(info)]

    return await answer(
        context,
        body,
        requests,
        lambda model, info: render.OllamaRenderer(body.model, context, is_chat=is_chat),
        stream=body.stream is not False,
    )


async def _load_or_unload(
    context: RequestContext, body: wire.OllamaFields, *, is_chat: bool
) -> Response:
    models = context.endpoint.models
    context.name_model(body.model)
    keep_alive_s = context.keep_alive_s(body.keep_alive)
    if keep_alive_s == 0:
        await models.unload(context.model)
    else:
        (await models.acquire(context.model, keep_alive_s)).release()
    reason, load_ns = "unload" if keep_alive_s == 0 else "load", int(context.seconds * 1e9)
    renderer = render.OllamaRenderer(body.model, context, is_chat=is_chat)
    return json_reply(renderer.piece(done=True, done_reason=reason, load_duration=load_ns))


@ROUTES.post("/api/embed")
@engine_call
def embed(
    context: RequestContext, body: wire.OllamaEmbedRequest, engine: Engine
) -> wire.OllamaEmbedReply:
    """Embed texts."""
    texts = [body.input] if isinstance(body.input, str) else list(body.input or ())
    inputs = _tokens(engine, texts, cut=body.truncate is not False)
    vectors = engine.embed(inputs) if inputs else []
    context.prompt_tokens = sum(map(len, inputs))
    return wire.OllamaEmbedReply(
        model=body.model,
        embeddings=[_shorten(vector, body.dimensions) for vector in vectors],
        prompt_eval_count=context.prompt_tokens,
        **render.durations(context),
    )


@ROUTES.post("/api/embeddings")
@engine_call
def embeddings(
    context: RequestContext, body: wire.OllamaEmbeddingsRequest, engine: Engine
) -> wire.OllamaEmbeddingsReply:
    """Embed one text (superseded by /api/embed)."""
    inputs = _tokens(engine, [body.prompt] if body.prompt else [], cut=True)
    vectors = engine.embed(inputs) if inputs else [[]]
    return wire.OllamaEmbeddingsReply(embedding=vectors[0])


def _tokens(engine: Engine, texts: Sequence[str], *, cut: bool) -> list[list[int]]:
    longest = engine.info.n_ctx_embed if cut else 0
    return [engine.tokenize(text, add_special=True)[: longest or None] for text in texts]


def _shorten(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` values of an embedding, scaled to length 1; all if None or 0."""
    if not dimensions or dimensions >= len(vector):
        return list(vector)
    short = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in short)) or 1.0
    return [x / length for x in short]


@ROUTES.get("/api/tags")
async def tags(context: RequestContext) -> wire.OllamaTags:
    """List the pulled models."""
    return render.list_models(await context.endpoint.in_thread(context.endpoint.models.list_available))


@ROUTES.post("/api/show", uses_model=False)
async def show(context: RequestContext, body: wire.OllamaShowRequest) -> wire.OllamaShowReply:
    """Describe a model and its capabilities."""
    model = await _find_model(context, body.model_name())
    info = context.endpoint.models.info(model.name)
    shown: wire.OllamaShowReply = await context.endpoint.in_thread(render.describe, model, info)
    return shown


@ROUTES.get("/api/ps")
async def running(context: RequestContext) -> wire.OllamaProcesses:
    """List the loaded models."""
    models = context.endpoint.models
    pulled = await context.endpoint.in_thread(models.list_available)
    by_name = {model.name: model for model in pulled}
    processes = [
        _running(loaded, info, by_name.get(loaded.id, AvailableModel(name=loaded.id)))
        for loaded in models.report()
        if (info := models.info(loaded.id)) is not None
    ]
    return wire.OllamaProcesses(models=processes)


def _running(loaded: LoadedReply, info: EngineInfo, pulled: AvailableModel) -> wire.RunningModel:
    name = ollama_name(loaded.id)
    left_s = _FOR_EVER_S if loaded.expires_in_s is None else loaded.expires_in_s
    return wire.RunningModel(
        name=name,
        model=name,
        size=loaded.size_bytes,
        digest=pulled.sha256 or info.sha256,
        details=render.details(pulled, info),
        expires_at=stamp(time.time() + left_s),
        size_vram=0,
        context_length=info.n_ctx,
    )


@ROUTES.get("/api/version")
async def version(context: RequestContext) -> wire.OllamaVersion:
    """Return the version of Ollama whose API is implemented."""
    return wire.OllamaVersion(version=API_VERSION, edgeinfer=__version__)


_DONE = wire.OllamaStatus(status="success")


def _admin_of(context: RequestContext) -> ModelAdministrator:
    admin = context.endpoint.model_admin
    if admin is None:
        message = (
            "Clients may not pull or remove models: "
            "the endpoint was started without `edgeinfer serve --ollama`."
        )
        raise Problem(403, message, code="models_are_fixed")
    return admin


@ROUTES.post("/api/pull", reply=wire.OllamaStatus, streams=True, is_admin=True)
async def pull(context: RequestContext, body: wire.OllamaPullRequest) -> Response:
    """Pull a model; each line of the stream reports progress."""
    admin, text = _admin_of(context), source_of(body.model_name())
    reports = reports_of(lambda report, cancel: admin.pull(text, report, cancel))
    first = await anext(reports, None)  # an error before the first report still gets an HTTP status
    if body.stream is False:
        await unless(until_disconnected(context.request.receive), _read_all(reports))
        return json_reply(_DONE)
    return StreamingResponse(
        _progress_lines(context, first, reports), media_type="application/x-ndjson"
    )


async def _read_all(reports: Reports) -> None:
    async for _ in reports:
        pass


async def _progress_lines(
    context: RequestContext, first: PullProgress | None, reports: Reports
) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield msgspec.json.encode(progress_line(first)) + b"\n"
        async for report in reports:
            yield msgspec.json.encode(progress_line(report)) + b"\n"
        last = msgspec.json.encode(_DONE) + b"\n"
    except Exception as error:  # noqa: BLE001  the status is sent, so the stream itself must report any failure
        problem = context.endpoint.problem_of(error, context.id)
        context.outcome = problem.code or "error"
        last = render.error_line(problem, context.id)
    finally:
        await reports.aclose()
    yield last


@ROUTES.delete("/api/delete", is_admin=True)
async def delete(context: RequestContext, body: wire.OllamaDeleteRequest) -> wire.OllamaStatus:
    """Remove a model."""
    admin, name = _admin_of(context), body.model_name()
    model = await _find_model(context, name)
    if lookup.find(name, [model]) is None:
        raise InvalidRequestError(
            f"{name} is an alias of the model {model.name}", hint="name the model itself", param="model"
        )
    await context.endpoint.models.unload(model.name)
    await context.endpoint.in_thread(admin.remove, model.name)
    return _DONE


def progress_line(now: PullProgress) -> wire.OllamaStatus:
    """Convert a progress report. Clients draw a progress bar for each `digest`."""
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
        case "converting" | "quantizing" | "scoring":
            total = now.total_bytes or 0
            return wire.OllamaStatus(status=now.stage, total=total, completed=now.done_bytes)
        case "done":
            return wire.OllamaStatus(status="writing manifest")
    return wire.OllamaStatus(status="pulling manifest")


async def _find_model(context: RequestContext, name: str) -> AvailableModel:
    """Return the model that a client means by `name`. Raises UnknownModelError."""
    models = context.endpoint.models
    resolved = models.resolve(name)
    pulled = await context.endpoint.in_thread(models.list_available)
    return next((model for model in pulled if model.name == resolved), AvailableModel(name=resolved))


OLLAMA = Dialect(
    name="ollama",
    error_type=wire.OllamaError,
    error_body=render.error_body,
    error_events=render.error_line,
    stream_type="application/x-ndjson",
    comment=render.waiting_line,
    prefix="/api/",
    checks_body_type=False,
    operations=ROUTES,
)
