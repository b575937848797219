"""Base classes and fields of wire types: the JSON objects that clients send and receive.

Every number has a range, because a negative count was a vulnerability of another server
(CVE-2026-21869).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.config.sampling_options import BY_FIELD


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """A request body, or an object inside one. Only its declared fields are supported.

    An undeclared field is ignored, and named in the response header `x-edgeinfer-ignored`. A field in
    `refused` is an error, because ignoring it would change what the answer means. An undeclared or
    refused field that is null, false or empty counts as not sent.
    """

    #: Name of a refused field → reason, which the error text contains.
    refused: ClassVar[Mapping[str, str]] = {}
    #: Prefix of a value of `type`, e.g. "mcp_tool_use" → reason why objects of this type are
    #: refused, although the original API accepts them.
    other_types: ClassVar[Mapping[str, str]] = {}
    #: Prefixes of values of `type`, e.g. "web_search_call". A list element of such a type is ignored,
    #: as an unknown field is.
    dropped_types: ClassVar[tuple[str, ...]] = ()
    #: Whether an object without `type` is decoded as this class.
    is_untagged_form: ClassVar[bool] = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A response body, or an object inside one. Clients ignore fields that they do not know."""


def _range(field: str) -> Meta:
    return Meta(ge=BY_FIELD[field].low, le=BY_FIELD[field].high)


#: Maximum of `max_tokens` and similar fields. The model's context usually allows fewer.
MAX_TOKENS = 1 << 24
_INT32 = 1 << 31

ModelName = Annotated[str, Meta(min_length=1, max_length=256, description="A pulled model's name.")]
_TOKENS_MEAN = "Maximum tokens of the answer; 0 only prefills the prompt for a later request."
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS, description=_TOKENS_MEAN)]
#: Maximum tokens of the answer in APIs of llama.cpp's server and LM Studio, where -1 means no limit.
TokenLimit = Annotated[
    int, Meta(ge=-1, le=MAX_TOKENS, description="Same as max_tokens of other APIs; -1 sets no limit.")
]
TokenId = Annotated[int, Meta(ge=0, lt=_INT32)]
#: Text of any length. Only the maximum size of a body limits it.
Text = str
ShortText = Annotated[str, Meta(max_length=1024)]
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:-]+$")]
Temperature = Annotated[float, _range("temperature")]
Probability = Annotated[float, _range("top_p")]
TopK = Annotated[int, Meta(ge=-1, le=BY_FIELD["top_k"].high, description="0 or -1 switches it off.")]
RepeatPenalty = Annotated[float, _range("repeat_penalty")]
ReasoningBudget = Annotated[
    int, Meta(ge=0, le=MAX_TOKENS, description="Tokens after which reasoning ends.")
]
#: How much a model reasons before it answers. "none" switches reasoning off.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopList = Annotated[list[StopString], Meta(max_length=128)]
JsonObject = dict[str, Any]
_STAY_MEANS = "Seconds that the model stays loaded; 0 unloads it, a negative number keeps it."
StaySeconds = Annotated[float, Meta(ge=-(1 << 52), le=1 << 52, description=_STAY_MEANS)]
Duration = Annotated[str, Meta(max_length=64, description='A duration: "5m", "1h30m", "-1".')]
KeepAlive = StaySeconds | Duration
CachePrompt = Annotated[bool, Meta(description="Whether the prefix cache is read and written.")]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=1024, description="Only equal salts share cached prefixes.")
]
_KEY_MEANS = "Name of a conversation; `edgeinfer forget --conversation` deletes its cached prefixes."
PromptCacheKey = Annotated[str, Meta(max_length=1024, description=_KEY_MEANS)]
Deadline = Annotated[
    float, Meta(gt=0, le=86_400, description="Seconds after which the answer is cut off.")
]


_RECEIPT_MEANS = "Whether the answer carries a `receipt`, which POST /v1/verify checks."
WithReceipt = Annotated[bool, Meta(description=_RECEIPT_MEANS)]


class LoraChoice(Wire, frozen=True, kw_only=True):
    """A LoRA adapter, by name, with its scale."""

    name: ModelName
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


LoraChoices = Annotated[list[LoraChoice], Meta(max_length=16)]


class ModelFields(Wire, frozen=True, kw_only=True):
    """Base of requests that use a model. `model` None means the default model.

    `keep_alive` is how long the model stays loaded after the request; None means the configured time.
    """

    model: ModelName | None = None
    keep_alive: KeepAlive | None = None


class GenerationFields(ModelFields, frozen=True, kw_only=True):
    """Base of requests that generate text: fields that every API has."""

    cache_prompt: CachePrompt = True
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None
    deadline_s: Deadline | None = None
    lora: LoraChoices | None = None
    receipt: WithReceipt = False


class SamplingFields(GenerationFields, frozen=True, kw_only=True):
    """Base of requests with llama.cpp's sampling options, under llama.cpp's names."""

    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_penalty: RepeatPenalty | None = None
    repeat_last_n: Annotated[int, _range("repeat_last_n")] | None = None
    presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
    dry_multiplier: Annotated[float, _range("dry_multiplier")] | None = None
    dry_base: Annotated[float, _range("dry_base")] | None = None
    dry_allowed_length: Annotated[int, _range("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, _range("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Annotated[list[StopString], Meta(max_length=32)] | None = None
    seed: Seed | None = None
    stop: StopString | StopList | None = None
    ignore_eos: bool = False
    overflow: Literal["refuse", "shift"] = "refuse"
    speculative: Literal["auto", "off", "ngram"] = "auto"


class Slot(Reply, frozen=True, kw_only=True):
    """An ended generation, with how much of its prompt came from the prefix cache.

    Of `n_prompt_tokens`, `cache_n` were cached and `prompt_n` were prefilled. After `n_diverged` tokens
    the prompt differs from every cached prefix; `cause` says why (`Divergence.cause`).
    """

    id_task: str
    model: str
    n_prompt_tokens: int
    cache_n: int
    cache_disk_n: int
    prompt_n: int
    n_decoded: int
    finish_reason: str
    n_diverged: int
    cause: str
    is_processing: bool = False


class PromptUsage(Reply, frozen=True, kw_only=True):
    """Token counts of a request that generates no text."""

    prompt_tokens: int
    total_tokens: int


class WireTimings(Reply, frozen=True, kw_only=True):
    """Times (ms) and rates (tokens per second), with llama.cpp's names and some more.

    `cache_n` prompt tokens were cached, in memory or on the disk; `cache_disk_n` is the number on the
    disk. `saved_ms` is the estimated prefill time that the cache saved. `constraint_ms` is the time
    spent on schemas and grammars.
    """

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    cache_n: int = 0
    cache_disk_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_token_ms: float = 0.0
    prompt_per_second: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float = 0.0
    predicted_per_second: float = 0.0
    constraint_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    saved_ms: float = 0.0
