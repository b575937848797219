"""OpenAI's answers and errors: chat completions, completions, embeddings, models.

Source: OpenAI's published OpenAPI document; `timings`, `reasoning_content` are llama.cpp's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgeinfer.server.core.wire import Reply, WireTimings


class ErrorBody(Reply, frozen=True, kw_only=True):
    """`type`, `param` and `code` are OpenAI's; `code` is ours where OpenAI has none."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply, frozen=True, kw_only=True):
    """OpenAI's error envelope."""

    error: ErrorBody


class PromptTokensDetails(Reply, frozen=True, kw_only=True):
    """Of `cached_tokens`, `cached_disk_tokens` came from the disk; that field is ours."""

    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(Reply, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class WireUsage(Reply, frozen=True, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(Reply, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Reply, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = msgspec.field(default_factory=list)


class ChoiceLogprobs(Reply, frozen=True, kw_only=True):
    content: list[TokenLogprob] | None = None
    refusal: None = None


class WireFunction(Reply, frozen=True, kw_only=True):
    name: str
    arguments: str


class WireToolCall(Reply, frozen=True, kw_only=True):
    id: str
    function: WireFunction
    type: Literal["function"] = "function"


class ReplyMessage(Reply, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str | None = msgspec.field(default_factory=lambda: None)
    refusal: None = msgspec.field(default_factory=lambda: None)
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = None
    function_call: WireFunction | None = None


WireFinish = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class ChatChoice(Reply, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    finish_reason: WireFinish
    logprobs: ChoiceLogprobs | None = None


class ChatCompletion(Reply, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: WireUsage
    timings: WireTimings
    service_tier: str = "default"
    system_fingerprint: str = ""


class DeltaFunction(Reply, frozen=True, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Reply, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction | None = None


class ChunkDelta(Reply, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None
    function_call: DeltaFunction | None = None


class ChunkChoice(Reply, frozen=True, kw_only=True):
    index: int
    delta: ChunkDelta
    finish_reason: WireFinish | None = None
    logprobs: ChoiceLogprobs | None = None


class ChatChunk(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """One SSE chunk of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = msgspec.field(
        default_factory=lambda: "chat.completion.chunk"
    )
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[ChunkChoice]
    usage: WireUsage | None = None
    timings: WireTimings | None = None


class CompletionLogprobs(Reply, frozen=True, kw_only=True):
    """Null: of the prompt's first token, which nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Reply, frozen=True, kw_only=True):
    """vLLM's form. `rank` is null for a token beyond the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(Reply, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: WireFinish | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /v1/completions, and each of its SSE chunks."""

    id: str
    object: Literal["text_completion"] = msgspec.field(default_factory=lambda: "text_completion")
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[CompletionChoice]
    usage: WireUsage | None = None
    timings: WireTimings | None = None


class Embedding(Reply, frozen=True, kw_only=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Reply, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(Reply, frozen=True, kw_only=True):
    """The answer of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelMeta(Reply, frozen=True, kw_only=True):
    """llama.cpp's place for what a model was trained on."""

    n_ctx_train: int = 0


class ModelCard(Reply, frozen=True, kw_only=True):
    """A model that is here. `state` is one of cold, loading, loaded; `size_bytes` is its files' size.

    `alias_of` is the model that an alias of the configuration means, "" for a model's own name.

    The context that a loaded model has, or what another was trained on, is told in the names that
    clients look for: vLLM's `max_model_len`, `context_length` of routers, Anthropic's
    `max_input_tokens`. `n_ctx` is 0 until it is loaded. `type`, `display_name` and `created_at` are
    Anthropic's.
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
    sha256: str = ""
    alias_of: str = ""


class ModelList(Reply, frozen=True, kw_only=True):
    """The answer of /v1/models, with what Anthropic's clients read of a page: there is only one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None
