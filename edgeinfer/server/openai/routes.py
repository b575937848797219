"""OpenAI's API: the routes for embeddings and models with their JSON types, and the dialect."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.context import RequestContext, engine_call
from edgeinfer.server.dialect import Dialect, RouteTable, stamp
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai import chat, completions
from edgeinfer.server.openai.wire import Prompt
from edgeinfer.server.wire_types import ModelFields, PromptUsage, Reply

ROUTES = RouteTable()

#: Maximum number of texts per request, as in OpenAI's API. The engine embeds texts in smaller batches.
_MAX_EMBEDDED = 2048


class EmbeddingRequest(ModelFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class Embedding(Reply, frozen=True, kw_only=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: Literal["list"] = "list"


@ROUTES.post("/v1/embeddings")
@engine_call
def embeddings(context: RequestContext, body: EmbeddingRequest, engine: Engine) -> EmbeddingReply:
    """Embed texts."""
    info, texts = engine.info, completions.prompts_of(body.input, "input", _MAX_EMBEDDED)
    if not info.can_embed:
        problem = f"{info.model} is not an embedding model"
        hint = "choose an embedding model: `edgeinfer list`"
        raise InvalidRequestError(problem, param="model", hint=hint)
    if body.dimensions not in (None, info.n_embd):
        message = f"dimensions must be {info.n_embd}, the size of {info.model}'s embeddings"
        hint = f"send {info.n_embd}, or leave dimensions out"
        raise InvalidRequestError(message, param="dimensions", hint=hint)
    vectors = [_encode_vector(vector, body.encoding_format) for vector in engine.embed(texts)]
    data = [Embedding(index=i, embedding=vector) for i, vector in enumerate(vectors)]
    n_tokens = context.prompt_tokens = sum(
        len(engine.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
        for text in texts
    )
    usage = PromptUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
    return EmbeddingReply(data=data, model=context.model, usage=usage)


def _encode_vector(vector: Sequence[float], encoding: str | None) -> str | list[float]:
    if encoding != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class ModelMeta(Reply, frozen=True, kw_only=True):
    """Metadata of a model, as in llama.cpp's server: the context size (tokens) of its training."""

    n_ctx_train: int = 0


class ModelArchitecture(Reply, frozen=True, kw_only=True):
    """Kinds of input and output of a model, as OpenRouter's list of models has them."""

    input_modalities: list[str]
    output_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])


class ModelCard(Reply, frozen=True, kw_only=True):
    """A model that requests may name.

    `state` is "cold", "loading" or "loaded"; `size_bytes` is the size of the model's files. `alias_of`
    is the model's own name if `id` is an alias, otherwise "". `n_ctx` is the context size (tokens), the
    trained one until the model is loaded.

    Clients look for the context size under different names: `max_model_len` (vLLM), `context_length`
    (OpenRouter), `max_input_tokens` (Anthropic). `type`, `display_name` and `created_at` are from
    Anthropic's API.
    """

    id: str
    created: int
    owned_by: str = "local"
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str = ""
    created_at: str = ""
    state: str = "cold"
    size_bytes: int = 0
    n_ctx: int = 0
    max_model_len: int = 0
    context_length: int = 0
    max_input_tokens: int = 0
    meta: ModelMeta = ModelMeta()
    architecture: ModelArchitecture
    sha256: str = ""
    alias_of: str = ""


class ModelCapabilities(Reply, frozen=True, kw_only=True):
    """Capabilities of a model, as in llama.cpp's server: "multimodal" if it accepts pictures."""

    name: str
    model: str
    capabilities: list[str]


class ModelList(Reply, frozen=True, kw_only=True):
    """Response of GET /v1/models, with OpenAI's, llama.cpp's and Anthropic's fields in one page."""

    data: list[ModelCard]
    models: list[ModelCapabilities]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str
    last_id: str


@ROUTES.get("/v1/models")
async def list_models(context: RequestContext) -> ModelList:
    """List the pulled models."""
    pulled = await context.endpoint.in_thread(context.endpoint.models.list_available)
    cards = [_card(context, model) for model in pulled]
    return ModelList(
        data=cards,
        models=[_capabilities(card) for card in cards],
        first_id=cards[0].id,
        last_id=cards[-1].id,
    )


def _capabilities(card: ModelCard) -> ModelCapabilities:
    sees = "image" in card.architecture.input_modalities
    capabilities = ["completion", *["multimodal"] * sees]
    return ModelCapabilities(name=card.id, model=card.id, capabilities=capabilities)


@ROUTES.get("/v1/models/{id}")
async def model_card(context: RequestContext) -> ModelCard:
    """Describe one pulled model."""
    name, models = context.path_id, context.endpoint.models
    pulled = {model.name: model for model in await context.endpoint.in_thread(models.list_available)}
    if name not in pulled:
        resolved = models.resolve(name)
        pulled[name] = msgspec.structs.replace(pulled[resolved], name=name, alias_of=resolved)
    return _card(context, pulled[name])


def _card(context: RequestContext, pulled: AvailableModel) -> ModelCard:
    models = context.endpoint.models
    model_name = pulled.alias_of or pulled.name
    info = models.info(model_name)
    n_ctx = info.n_ctx if info else pulled.n_ctx_train
    can_see = info.can_see if info else pulled.can_see
    return ModelCard(
        id=pulled.name,
        created=pulled.created,
        state=models.state(model_name),
        size_bytes=pulled.size_bytes or (info.weights_bytes if info else 0),
        created_at=stamp(pulled.created),
        display_name=pulled.name,
        n_ctx=n_ctx,
        max_model_len=n_ctx,
        context_length=n_ctx,
        max_input_tokens=n_ctx,
        meta=ModelMeta(n_ctx_train=pulled.n_ctx_train or (info.n_ctx_train if info else 0)),
        architecture=ModelArchitecture(input_modalities=["text", *["image"] * can_see]),
        sha256=pulled.sha256 or (info.sha256 if info else ""),
        alias_of=pulled.alias_of,
    )


OPENAI = Dialect(name="openai", operations=[*chat.ROUTES, *completions.ROUTES, *ROUTES], **chat.ERRORS)
