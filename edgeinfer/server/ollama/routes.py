"""Ollama's routes that ask: conversations, prompts, embeddings, and what is here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from starlette.responses import Response

from edgeinfer import __version__
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.context import RequestContext, json_reply, with_engine
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import answer
from edgeinfer.server.model_pool import AvailableModel, LoadedReply, listed_name
from edgeinfer.server.ollama import model_admin, model_view, translate, wire
from edgeinfer.server.ollama.render import (
    Clock,
    OllamaRenderer,
    Shape,
    chat_piece,
    error_body,
    error_line,
    generate_piece,
    stamp,
    waiting_line,
)

ROUTES = RouteTable()

#: Ollama's API as of this version is what is followed; clients refuse versions that they find too old.
API_VERSION = "0.13.0"
#: Ollama writes a time so far away where a model stays for ever.
_FOR_EVER_S = 100 * 365 * 86_400.0


@ROUTES.post("/api/chat", reply=wire.OllamaChatReply, streams=True)
async def chat(context: RequestContext, body: wire.OllamaChatRequest) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return await _load_or_unload(context, body, chat_piece)
    return await _answer(context, body, lambda info: translate.chat(body, info), chat_piece)


@ROUTES.post("/api/generate", reply=wire.OllamaGenerateReply, streams=True)
async def generate(context: RequestContext, body: wire.OllamaGenerateRequest) -> Response:
    """Answer a prompt, go on with it, or fill the gap before a suffix."""
    if not (body.prompt or body.suffix):
        return await _load_or_unload(context, body, generate_piece)
    return await _answer(context, body, lambda info: translate.generate(body, info), generate_piece)


async def _answer(
    context: RequestContext,
    body: wire.OllamaFields,
    request: Callable[[EngineInfo], GenerateRequest],
    shape: Shape,
) -> Response:
    def requests(info: EngineInfo) -> list[GenerateRequest]:
        context.ignore(translate.too_much(body.options, info))
        return [request(info)]

    return await answer(
        context,
        body,
        requests,
        lambda model, info: OllamaRenderer(body.model, Clock(context.started), shape),
        stream=body.stream is not False,
    )


async def _load_or_unload(context: RequestContext, body: wire.OllamaFields, shape: Shape) -> Response:
    models = context.endpoint.models
    context.model = models.resolve(body.model)
    stay_s = context.stay_s(body.keep_alive)
    if stay_s == 0:
        await models.unload(context.model)
    else:
        (await models.acquire(context.model, stay_s)).release()
    clock = Clock(context.started)
    reason = "unload" if stay_s == 0 else "load"
    return json_reply(
        OllamaRenderer(body.model, clock, shape).piece(
            done=True, done_reason=reason, load_duration=clock.load_ns
        )
    )


@ROUTES.post("/api/embed")
async def embed(context: RequestContext, body: wire.OllamaEmbedRequest) -> wire.OllamaEmbedReply:
    """Embed texts."""
    texts = [body.input] if isinstance(body.input, str) else list(body.input or ())

    def work(engine: Engine) -> wire.OllamaEmbedReply:
        clock = Clock(context.started)
        inputs = _tokens(engine, texts, cut=body.truncate is not False)
        vectors = engine.embed(inputs) if inputs else []
        return wire.OllamaEmbedReply(
            model=body.model,
            embeddings=[_shortened(vector, body.dimensions) for vector in vectors],
            total_duration=clock.total_ns(),
            load_duration=clock.load_ns,
            prompt_eval_count=sum(map(len, inputs)),
        )

    reply = await with_engine(context, body, work)
    context.prompt_tokens = reply.prompt_eval_count
    return reply


@ROUTES.post("/api/embeddings")
async def embeddings(
    context: RequestContext, body: wire.OllamaEmbeddingsRequest
) -> wire.OllamaEmbeddingsReply:
    """Embed a text, as before /api/embed."""

    def work(engine: Engine) -> wire.OllamaEmbeddingsReply:
        inputs = _tokens(engine, [body.prompt] if body.prompt else [], cut=True)
        vectors = engine.embed(inputs) if inputs else [[]]
        return wire.OllamaEmbeddingsReply(embedding=vectors[0])

    return await with_engine(context, body, work)


def _tokens(engine: Engine, texts: Sequence[str], *, cut: bool) -> list[list[int]]:
    longest = engine.info.n_ctx_embed if cut else 0
    return [engine.tokenize(text, add_special=True)[: longest or None] for text in texts]


def _shortened(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """Truncate a float32[n_embd] to `dimensions` and normalize it; all if None."""
    if not dimensions or dimensions >= len(vector):
        return list(vector)
    kept = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in kept)) or 1.0
    return [x / length for x in kept]


@ROUTES.get("/api/tags")
async def tags(context: RequestContext) -> wire.OllamaTags:
    """The pulled models."""
    return model_view.listed(await context.endpoint.in_thread(context.endpoint.models.pulled))


@ROUTES.post("/api/show", uses_model=False)
async def show(context: RequestContext, body: wire.OllamaShowRequest) -> wire.OllamaShowReply:
    """Describe a model and its capabilities."""
    model = await model_view.find(context, body.named())
    info = context.endpoint.models.info(model.name)
    shown: wire.OllamaShowReply = await context.endpoint.in_thread(model_view.describe, model, info)
    return shown


@ROUTES.get("/api/ps")
async def running(context: RequestContext) -> wire.OllamaProcesses:
    """The loaded models."""
    models = context.endpoint.models
    pulled = await context.endpoint.in_thread(models.pulled)
    here = {model.name: model for model in pulled}
    found = [
        _running(loaded, info, here.get(loaded.id, AvailableModel(name=loaded.id)))
        for loaded in models.report()
        if (info := models.info(loaded.id)) is not None
    ]
    return wire.OllamaProcesses(models=found)


def _running(loaded: LoadedReply, info: EngineInfo, pulled: AvailableModel) -> wire.RunningModel:
    name = listed_name(loaded.id)
    left_s = _FOR_EVER_S if loaded.expires_in_s is None else loaded.expires_in_s
    return wire.RunningModel(
        name=name,
        model=name,
        size=loaded.size_bytes,
        digest=pulled.sha256 or info.sha256,
        details=model_view.details(pulled, info),
        expires_at=stamp(time.time() + left_s),
        size_vram=0,
        context_length=info.n_ctx,
    )


@ROUTES.get("/api/version")
async def version(context: RequestContext) -> wire.OllamaVersion:
    """The version of Ollama's API that is followed here."""
    return wire.OllamaVersion(version=API_VERSION, edgeinfer=__version__)


OLLAMA = Dialect(
    name="ollama",
    error_type=wire.OllamaError,
    error_body=error_body,
    error_events=error_line,
    stream_type="application/x-ndjson",
    comment=waiting_line,
    prefix="/api/",
    checks_body_type=False,
    answers_any_name=False,
    operations=[*ROUTES, *model_admin.ROUTES],
)
