"""Routes of our own, in the names llama.cpp's server, Jina and Cohere gave them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.core.models.values import LoadedModel, LoadingModel
from edgeinfer.server.core.wire import (
    CachePrompt,
    CacheSalt,
    JsonObject,
    KeepAlive,
    LoraChoices,
    ModelName,
    PromptCacheKey,
    Reply,
    Seed,
    Slot,
    StopList,
    Temperature,
    Text,
    TokenCount,
    TokenId,
    Wire,
    WireTimings,
)
from edgeinfer.server.native.llama_wire import LlamaDefaults
from edgeinfer.server.openai.wire import Messages, Tools


class TokenizeRequest(Wire, frozen=True, kw_only=True):
    """POST /tokenize: llama.cpp's `content`, or vLLM's `prompt` or `messages`."""

    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    model: ModelName | None = None
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False
    keep_alive: KeepAlive | None = None


class TokenPiece(Reply, frozen=True, kw_only=True):
    id: TokenId
    piece: str | list[int]


class TokenizeReply(Reply, frozen=True, kw_only=True):
    """`tokens` are ids, or ids with pieces when asked; a piece that is not UTF-8 is its bytes.

    `count` and what follows are vLLM's, for its `prompt` and `messages`.
    """

    tokens: list[int | TokenPiece]
    count: int | msgspec.UnsetType = msgspec.UNSET
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(Wire, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: ModelName | None = None
    keep_alive: KeepAlive | None = None


class DetokenizeReply(Reply, frozen=True, kw_only=True):
    """The text under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(Reply, frozen=True, kw_only=True):
    """vLLM's answer, of which lm-evaluation-harness makes its tokenizer."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    model_max_length: int


class ApplyTemplateRequest(Wire, frozen=True, kw_only=True):
    """POST /apply-template."""

    messages: Messages
    model: ModelName | None = None
    tools: Tools | None = None
    chat_template_kwargs: JsonObject | None = None
    keep_alive: KeepAlive | None = None


class ApplyTemplateReply(Reply, frozen=True, kw_only=True):
    prompt: str


class RerankDocument(Wire, frozen=True, kw_only=True):
    text: Text


class RerankRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/rerank. TEI's clients say `texts`, and get TEI's answer."""

    query: Annotated[str, Meta(min_length=1, max_length=65_536)]
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1, max_length=1024)] | None = None
    texts: Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    raw_scores: bool = False
    return_text: bool = False
    model: ModelName | None = None
    top_n: Annotated[int, Meta(ge=1, le=4096)] | None = None
    return_documents: bool = False
    keep_alive: KeepAlive | None = None


class RerankResult(Reply, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class TeiRank(Reply, frozen=True, kw_only=True):
    """One of TEI's list, best first; `score` is between 0 and 1 unless `raw_scores` were asked for."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RerankUsage(Reply, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankReply(Reply, frozen=True, kw_only=True):
    """Best first."""

    model: str
    results: list[RerankResult]
    usage: RerankUsage
    object: Literal["list"] = "list"


class InferFields(Wire, frozen=True, kw_only=True):
    """What both ways of asking share."""

    model: ModelName | None = None
    system: Annotated[str, Meta(max_length=4096)] | None = None
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    cache_prompt: CachePrompt = True
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None
    keep_alive: KeepAlive | None = None


class InferQuery(InferFields, frozen=True, kw_only=True):
    """GET /infer, and POST /infer with a query. A longer prompt belongs into a body."""

    prompt: Annotated[str, Meta(min_length=1, max_length=4096)]


class InferRequest(InferFields, frozen=True, kw_only=True):
    """POST /infer with a body."""

    prompt: Annotated[str, Meta(min_length=1, max_length=1_048_576)]
    stop: StopList | None = None
    lora: LoraChoices | None = None


class InferReply(Reply, frozen=True, kw_only=True):
    """`result` is the answer."""

    result: str
    model: str
    finish_reason: str
    timings: WireTimings


class UnloadReply(Reply, frozen=True, kw_only=True):
    """A model in use is "unloading": it goes when its requests have ended."""

    id: str
    state: Literal["unloaded", "unloading", "not loaded"]


class RecallRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/models/{id}/recall. `agent`: a name that `edgeinfer launch` knows; `folder`: where its
    session is going to be, and whether that `is_repository`.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=32)]
    folder: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    is_repository: bool = False


class RecallReply(Reply, frozen=True, kw_only=True):
    """`n_tokens` are in memory now, 0 where nothing of the agent was on the disk."""

    id: str
    n_tokens: int


#: A name for a snapshot, begun with a letter or digit; "" for the one it has by its options.
SnapshotName = Annotated[str, Meta(max_length=64, pattern="^([A-Za-z0-9][A-Za-z0-9._+-]*)?$")]


class SnapshotRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/models/{id}/snapshot."""

    name: SnapshotName = ""


class SnapshotReply(Reply, frozen=True, kw_only=True):
    """`state` is "unchanged" where it was there already, with nothing changed since it was built."""

    id: str
    state: Literal["taken", "unchanged"]
    snapshot: str
    disk_bytes: int
    seconds: float


Status = Literal["ok", "loading", "draining", "error"]


class Health(Reply, frozen=True, kw_only=True):
    """`status`: ok, loading (503), draining (503), error (503)."""

    status: Status
    model: str
    loading: list[LoadingModel] = msgspec.field(default_factory=list)
    error: str | msgspec.UnsetType = msgspec.UNSET


class Slots(Reply, frozen=True, kw_only=True):
    """Generations that have ended, the latest first: of the key that asks, where there are several."""

    slots: list[Slot]


class Modalities(Reply, frozen=True, kw_only=True):
    """What can be read besides text: nothing."""

    vision: bool = False
    audio: bool = False


class Props(Reply, frozen=True, kw_only=True):
    """What this endpoint is and holds, and the default model as llama.cpp's server tells it."""

    version: str
    default_model: str
    models: list[LoadedModel]
    how_started: str
    start_reason: str
    start_stages_ms: dict[str, float]
    limits: dict[str, Any]
    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    build_info: str
    modalities: Modalities = Modalities()
