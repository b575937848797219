"""What llama.cpp's server takes and answers on routes of its own shape.

Source: the server's README in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.core.wire import (
    JsonObject,
    KeepAlive,
    ModelName,
    OpenAIPenalty,
    Probability,
    Reply,
    SamplingFields,
    Seed,
    ShortText,
    StopList,
    StopString,
    Temperature,
    Text,
    TokenId,
    TokenLimit,
    Wire,
    WireTimings,
)
from edgeinfer.server.openai.wire import LogitBias, Prompt


class LoraById(Wire, frozen=True, kw_only=True):
    """An adapter by its place in /lora-adapters."""

    id: Annotated[int, Meta(ge=0, le=63)]
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


#: `[token id, bias]`; a bias of false bans the token.
LogitBiasPairs = Annotated[
    list[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)] | bool]], Meta(max_length=1024)
]


class PromptText(Wire, frozen=True, kw_only=True):
    """A prompt as an object, whose place for images and sound must be empty."""

    refused: ClassVar[Mapping[str, str]] = {"multimodal_data": "only text is read"}

    prompt_string: Text


class LlamaFields(SamplingFields, frozen=True, kw_only=True):
    """What /completion and /infill share."""

    hints: ClassVar = frozenset(
        "id_slot n_cache_reuse n_indent n_keep return_progress samplers t_max_predict_ms "
        "t_max_prompt_ms timings_per_token".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        "dynatemp_range": "the temperature does not move",
        "image_data": "images cannot be read",
        "post_sampling_probs": "probabilities are those before sampling",
        "xtc_probability": "this sampler is not here",
    }
    hint_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "dynatemp_range": (0, 0.0),
        "xtc_probability": (0, 0.0),
    }

    lora: Annotated[list[LoraById], Meta(max_length=64)] | None = None
    model: ModelName | None = None
    n_predict: TokenLimit = -1
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: OpenAIPenalty | None = None
    frequency_penalty: OpenAIPenalty | None = None
    logit_bias: LogitBias | LogitBiasPairs | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] = 0
    response_fields: Annotated[list[ShortText], Meta(max_length=64)] | None = None
    return_tokens: bool = False
    seed: Seed | None = None
    stop: StopString | StopList | None = None


class LlamaCompletion(LlamaFields, frozen=True, kw_only=True):
    """POST /completion."""

    prompt: Prompt | PromptText
    grammar: Annotated[str, Meta(max_length=262_144)] | None = None
    json_schema: JsonObject | None = None


class InfillExtra(Wire, frozen=True, kw_only=True):
    """A piece of another file."""

    hints: ClassVar = frozenset({"time"})

    text: Text
    filename: Annotated[str, Meta(max_length=1024)] = ""


class LlamaInfill(LlamaFields, frozen=True, kw_only=True):
    """POST /infill: what to write between `input_prefix`, `prompt` and `input_suffix`."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[InfillExtra], Meta(max_length=1024)] | None = None
    prompt: Text = ""


StopType = Literal["none", "eos", "limit", "word"]


class LlamaLogprob(Reply, frozen=True, kw_only=True):
    """A token with its natural-log probability, a generated one with the likeliest in its place."""

    id: TokenId
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LlamaLogprob] | msgspec.UnsetType = msgspec.UNSET


class LlamaAnswer(Reply, frozen=True, kw_only=True):
    """The answer of /completion and /infill, and each event of a stream; the last one has `stop`.

    `tokens` come with `return_tokens`, `completion_probabilities` with `n_probs`.
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


class LlamaEmbedding(Wire, frozen=True, kw_only=True):
    """POST /embedding: one text or several, in `content` or in `input`."""

    hints: ClassVar = frozenset({"embd_normalize", "encoding_format"})

    content: Text | Annotated[list[Text], Meta(min_length=1, max_length=2048)] | None = None
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=2048)] | None = None
    model: ModelName | None = None
    keep_alive: KeepAlive | None = None


class LlamaVector(Reply, frozen=True, kw_only=True):
    """One text's embedding, in a list of its own as llama.cpp has it."""

    index: int
    embedding: list[list[float]]


class LlamaDefaults(Reply, frozen=True, kw_only=True):
    """What a request that says nothing gets. `n_ctx` is 0 while the model is cold."""

    n_ctx: int = 0
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class LoadedAdapter(Reply, frozen=True, kw_only=True):
    """An adapter of a model; `path` is its name, and a request names it in `lora`.

    `scale` is for requests that name none.
    """

    id: int
    path: str
    scale: float = 1.0


class AdaptersQuery(Wire, frozen=True, kw_only=True):
    """Whose adapters are meant: the default model's unless it is said."""

    model: ModelName | None = None


class LoadAdapter(Wire, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter, as vLLM's server takes it.

    `lora_path` is the name of a pulled adapter, `lora_name` unless it is given. With `scale` requests
    that name no adapters get it too.
    """

    hints: ClassVar = frozenset({"base_model_name", "is_3d_lora_weight", "load_inplace"})

    lora_name: ModelName
    lora_path: Annotated[str, Meta(max_length=4096)] = ""
    scale: Annotated[float, Meta(ge=-10, le=10)] = 0.0
    model: ModelName | None = None


class UnloadAdapter(Wire, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter, as vLLM's server takes it."""

    hints: ClassVar = frozenset({"lora_int_id"})

    lora_name: ModelName
    model: ModelName | None = None


class Version(Reply, frozen=True, kw_only=True):
    """As vLLM's server tells it."""

    version: str
