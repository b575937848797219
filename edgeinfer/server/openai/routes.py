"""OpenAI's routes."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.server.context import RequestContext, context_of, json_reply, with_engine
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import answer
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai import batch_routes, translate, wire
from edgeinfer.server.openai.render import ChatRenderer, CompletionRenderer, error_body, error_events
from edgeinfer.server.request_body import decode

ROUTES = RouteTable()

#: Texts of one request, as many as OpenAI takes; the engine embeds some at a time.
_MAX_EMBEDDED = 2048


@ROUTES.post("/v1/chat/completions", body=wire.ChatRequest, reply=wire.ChatCompletion, streams=True)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await decode(request, wire.ChatRequest)
    return await answer(
        context,
        body,
        lambda info: translate.chat(body, info),
        lambda model, info: ChatRenderer(f"chatcmpl-{context.plain_id}", model, info, body),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/completions", body=wire.CompletionRequest, reply=wire.Completion, streams=True)
async def completions(request: Request) -> Response:
    """Continue a text."""
    context = context_of(request)
    body = await decode(request, wire.CompletionRequest)
    prompts = translate.prompts(body.prompt, "prompt")
    return await answer(
        context,
        body,
        lambda info: translate.completion(body, info),
        lambda model, info: CompletionRenderer(f"cmpl-{context.plain_id}", model, info, body, prompts),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/embeddings", body=wire.EmbeddingRequest, reply=wire.EmbeddingReply)
async def embeddings(request: Request) -> Response:
    """Embed texts."""
    context = context_of(request)
    body = await decode(request, wire.EmbeddingRequest)
    texts = translate.prompts(body.input, "input", _MAX_EMBEDDED)

    reply = await embed(
        context, body.model, body.keep_alive, texts, body.encoding_format, body.dimensions
    )
    return json_reply(reply)


async def embed(
    context: RequestContext,
    model: str | None,
    keep_alive: float | str | None,
    texts: Sequence[str | tuple[int, ...]],
    encoding: str | None = None,
    dimensions: int | None = None,
) -> wire.EmbeddingReply:
    """Embed each text. Raises InvalidRequestError, and what loading raises."""

    def work(engine: Engine) -> wire.EmbeddingReply:
        _check_embeds(engine.info, dimensions)
        vectors = engine.embed(texts)
        return _embedded(vectors, _count(engine, texts), context.model, encoding)

    reply = await with_engine(context, model, keep_alive, work)
    context.prompt_tokens = reply.usage.prompt_tokens
    return reply


def _check_embeds(info: EngineInfo, dimensions: int | None) -> None:
    if not info.can_embed:
        raise InvalidRequestError(f"{info.model} makes no embeddings", param="model")
    if dimensions is not None and dimensions != info.n_embd:
        raise InvalidRequestError(
            f"this model's embeddings have {info.n_embd} dimensions", param="dimensions"
        )


def _count(engine: Engine, texts: Sequence[str | tuple[int, ...]]) -> int:
    """Count the tokens of all texts, each text or token ids."""
    return sum(
        len(engine.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
        for text in texts
    )


def _embedded(
    vectors: Sequence[Sequence[float]], tokens: int, model: str, encoding: str | None
) -> wire.EmbeddingReply:
    def encoded(vector: Sequence[float]) -> str | list[float]:
        if encoding != "base64":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [wire.Embedding(index=i, embedding=encoded(v)) for i, v in enumerate(vectors)]
    usage = wire.EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return wire.EmbeddingReply(data=data, model=model, usage=usage)


@ROUTES.get("/v1/models", reply=wire.ModelList)
async def list_models(request: Request) -> Response:
    """The pulled models."""
    context = context_of(request)
    models = context.endpoint.models
    pulled = await context.endpoint.in_thread(models.pulled)
    cards = [_card(context, model) for model in pulled]
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return json_reply(wire.ModelList(data=cards, first_id=first, last_id=last))


@ROUTES.get("/v1/models/{id}", reply=wire.ModelCard)
async def one_model(request: Request) -> Response:
    """One pulled model."""
    context = context_of(request)
    name = request.path_params["id"]
    models = context.endpoint.models
    pulled = {model.name: model for model in await context.endpoint.in_thread(models.pulled)}
    if name not in pulled:
        meant = models.resolve(name)
        pulled[name] = msgspec.structs.replace(pulled[meant], name=name, alias_of=meant)
    return json_reply(_card(context, pulled[name]))


def _card(context: RequestContext, pulled: AvailableModel) -> wire.ModelCard:
    models = context.endpoint.models
    meant = pulled.alias_of or pulled.name
    info = models.info(meant)
    n_ctx = info.n_ctx if info else pulled.n_ctx_train
    return wire.ModelCard(
        id=pulled.name,
        created=pulled.created,
        state=models.state(meant),
        size_bytes=pulled.size_bytes or (info.weights_bytes if info else 0),
        created_at=_stamp(pulled.created),
        display_name=pulled.name,
        n_ctx=info.n_ctx if info else 0,
        max_model_len=n_ctx,
        context_length=n_ctx,
        max_input_tokens=n_ctx,
        meta=wire.ModelMeta(n_ctx_train=pulled.n_ctx_train or (info.n_ctx_train if info else 0)),
        sha256=pulled.sha256 or (info.sha256 if info else ""),
        alias_of=pulled.alias_of,
    )


def _stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


OPENAI = Dialect(
    name="openai",
    error_type=wire.ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=[*ROUTES, *batch_routes.ROUTES],
)
