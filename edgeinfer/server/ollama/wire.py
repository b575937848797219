"""Ollama's requests.

Source: Ollama's published API document and the types of its Python package. Whole numbers come as
floats too (Home Assistant sends `8192.0`); fractions are cut off, as in Ollama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.media.pictures import MAX_PICTURES
from edgeinfer.server.openai.wire import TokenLogprob, Tools
from edgeinfer.server.problems import missing
from edgeinfer.server.wire_types import (
    Effort,
    GenerationFields,
    JsonObject,
    ModelFields,
    ModelName,
    Probability,
    Reply,
    ShortText,
    StopList,
    StopString,
    Temperature,
    Text,
    ToolName,
    Wire,
)

_WHOLE = 1 << 53
Whole = Annotated[float, Meta(ge=-_WHOLE, le=_WHOLE)]
Format = Literal["", "json"] | JsonObject
Think = bool | Effort
OptionalName = Annotated[str, Meta(max_length=256)]


class Options(Wire, frozen=True, kw_only=True):
    """Sampling options. Load options and unsupported samplers are ignored."""

    num_predict: Whole | None = None
    temperature: Temperature | None = None
    top_k: Whole | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_last_n: Whole | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Whole | None = None
    stop: StopString | StopList | None = None
    num_ctx: Whole | None = None


class NeedsModel(ModelFields, frozen=True, kw_only=True):
    """A request about a model; Ollama has no default model."""

    model: ModelName


class OllamaFields(GenerationFields, frozen=True, kw_only=True):
    """Fields that /api/chat and /api/generate share. `stream` defaults to true."""

    model: ModelName
    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class CalledFunction(Wire, frozen=True, kw_only=True):
    """A function's name with its arguments."""

    name: ToolName
    arguments: JsonObject | Text


class CallParam(Wire, frozen=True, kw_only=True):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: ShortText | None = None
    type: ShortText | None = None


#: Pictures in base64; they are placed before the text.
Images = Annotated[list[Text], Meta(max_length=MAX_PICTURES)]


class MessageParam(Wire, frozen=True, kw_only=True):
    """A turn. `tool_name` names the tool whose result a `tool` turn is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    images: Images | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[CallParam], Meta(max_length=128)] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None
    name: ShortText | None = None


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True):
    """POST /api/chat. Without messages the model is only loaded or unloaded."""

    messages: Annotated[list[MessageParam], Meta(max_length=4096)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields, frozen=True, kw_only=True):
    """POST /api/generate. Without a prompt the model is only loaded or unloaded."""

    refused: ClassVar[Mapping[str, str]] = {
        "context": "send the conversation to /api/chat",
        "width": "models generate only text",
        "height": "models generate only text",
        "steps": "models generate only text",
    }

    prompt: Text | None = None
    images: Images | None = None
    suffix: Text | None = None
    system: Text | None = None
    template: Text | None = None
    raw: bool | None = None


class OllamaEmbedRequest(NeedsModel, frozen=True, kw_only=True):
    """POST /api/embed."""

    input: Text | Annotated[list[Text], Meta(max_length=2048)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    options: Options | None = None


class OllamaEmbeddingsRequest(NeedsModel, frozen=True, kw_only=True):
    """POST /api/embeddings, which /api/embed has replaced."""

    prompt: Text | None = None
    options: Options | None = None


class OllamaDeleteRequest(Wire, frozen=True, kw_only=True):
    """DELETE /api/delete. `name` is the older spelling of `model`."""

    model: OptionalName = ""
    name: OptionalName = ""

    def model_name(self) -> str:
        """Return the model. Raises Problem 400 without one."""
        if not (self.model or self.name):
            raise missing("model")
        return self.model or self.name


class OllamaShowRequest(OllamaDeleteRequest, frozen=True, kw_only=True):
    """POST /api/show."""

    verbose: bool | None = None


class OllamaPullRequest(OllamaDeleteRequest, frozen=True, kw_only=True):
    """POST /api/pull."""

    stream: bool | None = None


class OllamaError(Reply, frozen=True, kw_only=True):
    """Ollama's error envelope."""

    error: str


DoneReason = Literal["stop", "length", "load", "unload"]


class AnswerFields(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of the answers of both routes. The last line has the statistics, without zeros (as
    Ollama).
    """

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[TokenLogprob] | None = None


class CalledReply(Reply, frozen=True, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallReply(Reply, frozen=True, kw_only=True):
    id: str
    function: CalledReply


class OllamaMessage(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """A turn of the assistant, or the next piece of it."""

    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str
    thinking: str = ""
    tool_calls: list[ToolCallReply] | None = None


class OllamaChatReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /api/chat, and each line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /api/generate, and each line of its stream."""

    response: str
    thinking: str = ""


class OllamaEmbedReply(Reply, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(Reply, frozen=True, kw_only=True):
    embedding: list[float]


class ModelDetails(Reply, frozen=True, kw_only=True):
    """Details of a model. `family` is its architecture's name in GGUF."""

    parent_model: str = ""
    format: str = "gguf"
    family: str = ""
    families: list[str] = msgspec.field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Reply, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class OllamaTags(Reply, frozen=True, kw_only=True):
    """The answer of /api/tags."""

    models: list[ListedModel]


class RunningModel(Reply, frozen=True, kw_only=True):
    """A loaded model. `size` is its memory (bytes), a GPU's included."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(Reply, frozen=True, kw_only=True):
    """The answer of /api/ps."""

    models: list[RunningModel]


class OllamaShowReply(Reply, frozen=True, kw_only=True):
    """The answer of /api/show. `template` is the file's Jinja template, not Ollama's notation."""

    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""
    system: str = ""


class OllamaStatus(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of a change; the last status is "success"."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class OllamaVersion(Reply, frozen=True, kw_only=True):
    """`version` of Ollama's API that is implemented here; clients compare it."""

    version: str
    edgeinfer: str
