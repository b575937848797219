"""JSON types of Ollama's API.

Source: Ollama's API document and the types of Ollama's Python package. Integers may be sent as floats
(Home Assistant: `8192.0`); as in Ollama, fractions are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.media.pictures import MAX_PICTURES
from edgeinfer.server.openai.wire import FunctionCall, TokenLogprob, Tools
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
    Wire,
)

_WHOLE = 1 << 53
Whole = Annotated[float, Meta(ge=-_WHOLE, le=_WHOLE)]
Format = Literal["", "json"] | JsonObject
Think = bool | Effort
OptionalName = Annotated[str, Meta(max_length=256)]


class Options(Wire, frozen=True, kw_only=True):
    """Sampling options. Options that Ollama applies when it loads a model (`num_gpu`) are ignored."""

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
    """Base of requests that must name a model: Ollama has no default model."""

    model: ModelName


class OllamaFields(GenerationFields, frozen=True, kw_only=True):
    """Base of the bodies of POST /api/chat and /api/generate. `stream` defaults to true."""

    model: ModelName
    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class CallParam(Wire, frozen=True, kw_only=True):
    """A tool call of the assistant in an earlier turn."""

    function: FunctionCall
    id: ShortText | None = None
    type: ShortText | None = None


#: Pictures in base64, which the model sees before the text.
Images = Annotated[list[Text], Meta(max_length=MAX_PICTURES)]


class MessageParam(Wire, frozen=True, kw_only=True):
    """A message. If `role` is "tool", it is the result of the tool `tool_name`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    images: Images | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[CallParam], Meta(max_length=128)] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None
    name: ShortText | None = None


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True):
    """Body of POST /api/chat.

    Without `messages`, the model is loaded, or unloaded if `keep_alive` is 0.
    """

    messages: Annotated[list[MessageParam], Meta(max_length=4096)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields, frozen=True, kw_only=True):
    """Body of POST /api/generate.

    Without `prompt` and `suffix`, the model is loaded, or unloaded if `keep_alive` is 0.
    """

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
    """Body of POST /api/embed."""

    input: Text | Annotated[list[Text], Meta(max_length=2048)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    options: Options | None = None


class OllamaEmbeddingsRequest(NeedsModel, frozen=True, kw_only=True):
    """Body of POST /api/embeddings, the predecessor of /api/embed."""

    prompt: Text | None = None
    options: Options | None = None


class OllamaDeleteRequest(Wire, frozen=True, kw_only=True):
    """Body of DELETE /api/delete. Older clients send `name` in place of `model`."""

    model: OptionalName = ""
    name: OptionalName = ""

    def model_name(self) -> str:
        """Return the named model. Raises Problem 400 if there is none."""
        if not (self.model or self.name):
            raise missing("model")
        return self.model or self.name


class OllamaShowRequest(OllamaDeleteRequest, frozen=True, kw_only=True):
    """Body of POST /api/show."""

    verbose: bool | None = None


class OllamaPullRequest(OllamaDeleteRequest, frozen=True, kw_only=True):
    """Body of POST /api/pull."""

    stream: bool | None = None


class OllamaError(Reply, frozen=True, kw_only=True):
    """Ollama's error response."""

    error: str


DoneReason = Literal["stop", "length", "load", "unload"]


class AnswerFields(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the responses of /api/chat and /api/generate, and of each line of their streams.

    Only the last line has counts and durations (ns). As in Ollama, zeros are left out.
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
    """The assistant's message; in a stream, the next piece of the message."""

    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str
    thinking: str = ""
    tool_calls: list[ToolCallReply] | None = None


class OllamaChatReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """Response of /api/chat, and each line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """Response of /api/generate, and each line of its stream."""

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
    """Details of a model. `family` is GGUF's `general.architecture`, e.g. "llama"."""

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
    """Response of GET /api/tags."""

    models: list[ListedModel]


class RunningModel(Reply, frozen=True, kw_only=True):
    """A loaded model. `size` is its memory (bytes) in RAM and on GPUs."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(Reply, frozen=True, kw_only=True):
    """Response of GET /api/ps."""

    models: list[RunningModel]


class OllamaShowReply(Reply, frozen=True, kw_only=True):
    """Response of POST /api/show. `template` is in Jinja, not in Ollama's template language."""

    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""
    system: str = ""


class OllamaStatus(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of a pull (`completed` of `total` bytes), or "success" after a pull or deletion."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class OllamaVersion(Reply, frozen=True, kw_only=True):
    """Response of GET /api/version: Ollama's version, which clients check, and edgeinfer's own."""

    version: str
    edgeinfer: str
