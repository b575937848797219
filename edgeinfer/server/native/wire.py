"""JSON types of edgeinfer's own routes. Names of fields follow llama.cpp's server, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.media.pictures import MAX_PICTURES
from edgeinfer.server.model_entry import LoadedReply, LoadingReply
from edgeinfer.server.openai.wire import LogitBias, Prompt
from edgeinfer.server.wire_types import (
    GenerationFields,
    JsonObject,
    ModelFields,
    ModelName,
    PromptUsage,
    Reply,
    SamplingFields,
    Seed,
    Slot,
    StopList,
    Temperature,
    Text,
    TokenCount,
    TokenId,
    TokenLimit,
    Wire,
    WireTimings,
)


class TokenizeRequest(ModelFields, frozen=True, kw_only=True):
    """Body of POST /tokenize, with the fields of llama.cpp's server."""

    content: Text
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class TokenPiece(Reply, frozen=True, kw_only=True):
    id: TokenId
    piece: str | list[int]


class TokenizeReply(Reply, frozen=True, kw_only=True):
    """Response of POST /tokenize. `tokens` are ids, or with `with_pieces` also each token's text.

    The text of a token that is not valid UTF-8 is a list of bytes.
    """

    tokens: list[int | TokenPiece]


class DetokenizeRequest(ModelFields, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]


class DetokenizeReply(Reply, frozen=True, kw_only=True):
    content: str


class RerankDocument(Wire, frozen=True, kw_only=True):
    text: Text


class RerankRequest(ModelFields, frozen=True, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Annotated[str, Meta(min_length=1, max_length=65_536)]
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1, max_length=1024)]
    top_n: Annotated[int, Meta(ge=1, le=4096)] | None = None
    return_documents: bool = False


class RerankResult(Reply, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class RerankReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/rerank: documents with scores, the most relevant first."""

    model: str
    results: list[RerankResult]
    usage: PromptUsage
    object: Literal["list"] = "list"


class VerifyRequest(ModelFields, frozen=True, kw_only=True):
    """Body of POST /v1/verify. Without `model`, the model that the receipt names is used."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("kv_type", "n_ctx"), 'options of `serve` set it; a receipt is sent as {"receipt": …}'
    )

    receipt: JsonObject


class InferQuery(GenerationFields, frozen=True, kw_only=True):
    """Query of GET and POST /infer. A prompt of more than 4,096 characters must be in the body."""

    prompt: Annotated[str, Meta(min_length=1, max_length=4096)]
    system: Annotated[str, Meta(max_length=4096)] | None = None
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None


class InferRequest(InferQuery, frozen=True, kw_only=True):
    """Body of POST /infer."""

    prompt: Annotated[str, Meta(min_length=1, max_length=1_048_576)]
    stop: StopList | None = None


class InferReply(Reply, frozen=True, kw_only=True):
    """Response of /infer. `result` is the generated text."""

    result: str
    model: str
    finish_reason: str
    timings: WireTimings


class UnloadReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/models/{id}/unload. "unloading": running requests still use the model."""

    id: str
    state: Literal["unloaded", "unloading", "not loaded"]


class RecallRequest(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/models/{id}/recall, to prefill the prompt prefix that an agent will send.

    `agent` is a name of `edgeinfer launch`, e.g. "claude". `folder` is the working directory of the
    agent's session; `is_repository` says whether `folder` is a Git repository.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=32)]
    folder: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    is_repository: bool = False


class RecallReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/models/{id}/recall.

    `n_tokens` is the length of the prefilled prefix; 0 if there is none, or if it exceeds the context.
    """

    id: str
    n_tokens: int


#: Name of a snapshot, with a letter or digit first; "" means a name made of the load options.
SnapshotName = Annotated[str, Meta(max_length=64, pattern="^([A-Za-z0-9][A-Za-z0-9._+-]*)?$")]


class SnapshotRequest(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/models/{id}/snapshot."""

    name: SnapshotName = ""


class SnapshotReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/models/{id}/snapshot. "unchanged": the existing snapshot is still valid."""

    id: str
    state: Literal["taken", "unchanged"]
    snapshot: str
    disk_bytes: int
    seconds: float


Status = Literal["ok", "loading", "draining", "error"]


class Health(Reply, frozen=True, kw_only=True):
    """Response of GET /health: with HTTP status 200 if `status` is "ok", otherwise with 503."""

    status: Status
    model: str
    loading: list[LoadingReply] = msgspec.field(default_factory=list)
    error: str | msgspec.UnsetType = msgspec.UNSET


class Slots(Reply, frozen=True, kw_only=True):
    """Response of GET /slots: ended generations of the client's API key, the latest first."""

    slots: list[Slot]


class Modalities(Reply, frozen=True, kw_only=True):
    """Kinds of input, besides text, that the default model accepts."""

    vision: bool = False
    audio: bool = False


class PromptNormalization(Reply, frozen=True, kw_only=True):
    """The enabled rules of `normalize-prompts`, and the coding agents whose prompts they change."""

    rules: list[str]
    agents: list[str]


class LlamaDefaults(Reply, frozen=True, kw_only=True):
    """Sampling defaults and context size (tokens, 0 if not loaded) of the default model."""

    n_ctx: int = 0
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class Props(Reply, frozen=True, kw_only=True):
    """Response of GET /props and GET /status.

    The fields from `default_generation_settings` to `modalities` describe the default model, as in
    llama.cpp's server. `requests` is the number of running requests that use a model. For each
    configured tool whose arguments may differ from the tool's schema, `loose_tools` has the tool's name
    and the reason. `payload_log` is null if switched off.
    """

    version: str
    health: Health
    requests: int
    default_model: str
    models: list[LoadedReply]
    how_started: str
    start_reason: str
    start_stages_ms: dict[str, float]
    limits: dict[str, Any]
    loose_tools: list[str]
    prompt_normalization: PromptNormalization
    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    build_info: str
    modalities: Modalities = Modalities()
    payload_log: dict[str, Any] | None = None


class LoraById(Wire, frozen=True, kw_only=True):
    """A LoRA adapter by its index in the list of loaded adapters, with its scale."""

    id: Annotated[int, Meta(ge=0, le=63)]
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


#: Pairs `[token id, bias]`, e.g. `[15043, -1.5]`; the bias `false` bans the token.
LogitBiasPairs = Annotated[
    list[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)] | bool]], Meta(max_length=1024)
]


class PromptText(Wire, frozen=True, kw_only=True):
    """A prompt with pictures in base64, one for each `<__media__>` in its text."""

    prompt_string: Text
    multimodal_data: Annotated[list[Text], Meta(max_length=MAX_PICTURES)] | None = None


class LlamaFields(SamplingFields, frozen=True, kw_only=True):
    """Base of the bodies of POST /completion and /infill."""

    refused: ClassVar[Mapping[str, str]] = {
        "dynatemp_range": "a dynamic temperature is not supported",
        "image_data": "send pictures in multimodal_data of `prompt`, or in a chat",
        "post_sampling_probs": "only probabilities before sampling are available",
        "xtc_probability": "this sampler is not supported",
    }

    lora: Annotated[list[LoraById], Meta(max_length=64)] | None = None  # type: ignore[assignment]  # as in llama.cpp
    n_predict: TokenLimit = -1
    stream: bool = False
    temperature: Temperature | None = None
    logit_bias: LogitBias | LogitBiasPairs | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] = 0
    return_tokens: bool = False


class LlamaCompletion(LlamaFields, frozen=True, kw_only=True):
    """Body of POST /completion."""

    prompt: Prompt | PromptText
    grammar: Annotated[str, Meta(max_length=262_144)] | None = None
    json_schema: JsonObject | None = None


class InfillExtra(Wire, frozen=True, kw_only=True):
    """Text of another file, which the model sees before `input_prefix`."""

    text: Text
    filename: Annotated[str, Meta(max_length=1024)] = ""


class LlamaInfill(LlamaFields, frozen=True, kw_only=True):
    """Body of POST /infill, to write the text between `input_prefix` + `prompt` and `input_suffix`."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[InfillExtra], Meta(max_length=1024)] | None = None
    prompt: Text = ""


StopType = Literal["none", "eos", "limit", "word"]


class LlamaLogprob(Reply, frozen=True, kw_only=True):
    """A token with its log probability (natural logarithm), and the most likely alternatives."""

    id: TokenId
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LlamaLogprob] | msgspec.UnsetType = msgspec.UNSET


class LlamaAnswer(Reply, frozen=True, kw_only=True):
    """Response of /completion and /infill, and each event of their streams.

    The last event has `stop` true, with the fields from `tokens_predicted` on. `tokens` are sent for
    `return_tokens`, and `completion_probabilities` for `n_probs`.
    """

    content: str = ""
    stop: bool = False
    index: int = 0
    id_slot: int = -1
    model: str = ""
    tokens: list[int] | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[LlamaLogprob] | msgspec.UnsetType = msgspec.UNSET
    tokens_predicted: int | msgspec.UnsetType = msgspec.UNSET
    tokens_evaluated: int | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    generation_settings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: StopType | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET


class ModelQuery(Wire, frozen=True, kw_only=True):
    """Base of requests about a model. `model` None means the default model."""

    model: ModelName | None = None


class LoadAdapter(ModelQuery, frozen=True, kw_only=True):
    """Body of POST /v1/load_lora_adapter, with vLLM's fields and `scale`.

    `lora_path` is the name of a pulled adapter, by default `lora_name`. `scale` is for requests that
    choose no adapters: if it is 0, only requests that choose the adapter use it.
    """

    lora_name: ModelName
    lora_path: Annotated[str, Meta(max_length=4096)] = ""
    scale: Annotated[float, Meta(ge=-10, le=10)] = 0.0


class UnloadAdapter(ModelQuery, frozen=True, kw_only=True):
    """Body of POST /v1/unload_lora_adapter, with vLLM's fields."""

    lora_name: ModelName
