"""OpenAI's routes: chat completions, completions, embeddings and models."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.context import RequestContext, engine_call
from edgeinfer.server.dialect import Dialect, RouteTable, stamp
from edgeinfer.server.generation_response import answer
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai import translate, wire
from edgeinfer.server.openai.render import ERRORS, ChatRenderer, CompletionRenderer
from edgeinfer.server.wire_types import PromptUsage

ROUTES = RouteTable()

#: Maximum number of texts per request, as at OpenAI. The engine embeds them in smaller batches.
_MAX_EMBEDDED = 2048


@ROUTES.post("/v1/chat/completions", reply=wire.ChatCompletion, streams=True)
async def chat_completions(context: RequestContext, body: wire.ChatRequest) -> Response:
    """Answer a conversation."""
    if body.store is True:
        context.ignore(["store"])
    return await answer(
        context,
        body,
        lambda info: translate.chat(body, info),
        lambda model, info: ChatRenderer(f"chatcmpl-{context.plain_id}", model, info, body),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/completions", reply=wire.Completion, streams=True)
async def completions(context: RequestContext, body: wire.CompletionRequest) -> Response:
    """Continue a text."""
    prompts = translate.prompts(body.prompt, "prompt")
    return await answer(
        context,
        body,
        lambda info: translate.completion(body, info),
        lambda model, info: CompletionRenderer(f"cmpl-{context.plain_id}", model, info, body, prompts),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/embeddings")
@engine_call
def embeddings(
    context: RequestContext, body: wire.EmbeddingRequest, engine: Engine
) -> wire.EmbeddingReply:
    """Embed texts."""
    info, texts = engine.info, translate.prompts(body.input, "input", _MAX_EMBEDDED)
    if not info.can_embed:
        problem = f"{info.model} is not an embedding model"
        hint = "choose an embedding model: `edgeinfer list`"
        raise InvalidRequestError(problem, param="model", hint=hint)
    if body.dimensions not in (None, info.n_embd):
        message = f"this model's embeddings have {info.n_embd} dimensions"
        raise InvalidRequestError(message, param="dimensions")
    vectors = [_encode_vector(vector, body.encoding_format) for vector in engine.embed(texts)]
    data = [wire.Embedding(index=i, embedding=vector) for i, vector in enumerate(vectors)]
    n_tokens = context.prompt_tokens = sum(
        len(engine.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
        for text in texts
    )
    usage = PromptUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
    return wire.EmbeddingReply(data=data, model=context.model, usage=usage)


def _encode_vector(vector: Sequence[float], encoding: str | None) -> str | list[float]:
    if encoding != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


@ROUTES.get("/v1/models")
async def list_models(context: RequestContext) -> wire.ModelList:
    """List the pulled models."""
    pulled = await context.endpoint.in_thread(context.endpoint.models.list_available)
    cards = [_card(context, model) for model in pulled]
    return wire.ModelList(
        data=cards,
        models=[_capabilities(card) for card in cards],
        first_id=cards[0].id,
        last_id=cards[-1].id,
    )


def _capabilities(card: wire.ModelCard) -> wire.ModelCapabilities:
    sees = "image" in card.architecture.input_modalities
    capabilities = ["completion", *["multimodal"] * sees]
    return wire.ModelCapabilities(name=card.id, model=card.id, capabilities=capabilities)


@ROUTES.get("/v1/models/{id}")
async def model_card(context: RequestContext) -> wire.ModelCard:
    """Describe one pulled model."""
    name, models = context.path_id, context.endpoint.models
    pulled = {model.name: model for model in await context.endpoint.in_thread(models.list_available)}
    if name not in pulled:
        resolved = models.resolve(name)
        pulled[name] = msgspec.structs.replace(pulled[resolved], name=name, alias_of=resolved)
    return _card(context, pulled[name])


def _card(context: RequestContext, pulled: AvailableModel) -> wire.ModelCard:
    models = context.endpoint.models
    model_name = pulled.alias_of or pulled.name
    info = models.info(model_name)
    n_ctx = info.n_ctx if info else pulled.n_ctx_train
    can_see = info.can_see if info else pulled.can_see
    return wire.ModelCard(
        id=pulled.name,
        created=pulled.created,
        state=models.state(model_name),
        size_bytes=pulled.size_bytes or (info.weights_bytes if info else 0),
        created_at=stamp(pulled.created),
        display_name=pulled.name,
        n_ctx=info.n_ctx if info else 0,
        max_model_len=n_ctx,
        context_length=n_ctx,
        max_input_tokens=n_ctx,
        meta=wire.ModelMeta(n_ctx_train=pulled.n_ctx_train or (info.n_ctx_train if info else 0)),
        architecture=wire.ModelArchitecture(input_modalities=["text", *["image"] * can_see]),
        sha256=pulled.sha256 or (info.sha256 if info else ""),
        alias_of=pulled.alias_of,
    )


OPENAI = Dialect(name="openai", operations=ROUTES, **ERRORS)
