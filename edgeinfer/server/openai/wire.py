"""OpenAI's chat completions, completions, embeddings and models, for a local text model.

Source: OpenAI's published OpenAPI document. Fields of it that are absent here (`audio`, `store: true`,
`prediction`, `web_search_options`, …) cannot be honoured and are refused as unknown. Fields beyond it
(`top_k`, `grammar`, `keep_alive`, …) keep the names that llama.cpp's and vLLM's servers gave them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.core.wire import (
    JsonObject,
    KeepAlive,
    LoraChoice,
    ModelName,
    OpenAIPenalty,
    OpenAITemperature,
    Probability,
    SamplingFields,
    Seed,
    ShortText,
    StopList,
    StopString,
    Text,
    TokenCount,
    TokenId,
    ToolName,
    Wire,
)

# --- requests
# --------------------------------------------------------------------------------


class TextPart(Wire, frozen=True, kw_only=True):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


Content = str | Annotated[list[TextPart], Meta(max_length=1024)]


class FunctionCall(Wire, frozen=True, kw_only=True):
    """A function's name with its arguments as JSON text."""

    name: ToolName
    arguments: Text


class ToolCallParam(Wire, frozen=True, kw_only=True):
    """A call the assistant made in an earlier turn."""

    id: ShortText
    function: FunctionCall
    type: Literal["function"] = "function"


class SystemMessage(Wire, frozen=True, tag="system", tag_field="role"):
    """Instructions."""

    content: Content
    name: ShortText | None = None


class DeveloperMessage(Wire, frozen=True, tag="developer", tag_field="role"):
    """Instructions, in the newer spelling."""

    content: Content
    name: ShortText | None = None


class UserMessage(Wire, frozen=True, tag="user", tag_field="role"):
    """What the user said."""

    content: Content
    name: ShortText | None = None


class AssistantMessage(Wire, frozen=True, tag="assistant", tag_field="role"):
    """An earlier answer, as our own responses spell it."""

    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCallParam], Meta(max_length=128)] | None = None
    name: ShortText | None = None
    refusal: None = None
    annotations: Annotated[list[JsonObject], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Wire, frozen=True, tag="tool", tag_field="role"):
    """A tool's answer."""

    content: Content
    tool_call_id: ShortText


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class FunctionTool(Wire, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolParam(Wire, frozen=True, kw_only=True):
    """A tool; only functions exist here."""

    function: FunctionTool
    type: Literal["function"] = "function"


class NamedFunction(Wire, frozen=True, kw_only=True):
    """The one function to call."""

    name: ToolName


class NamedToolChoice(Wire, frozen=True, kw_only=True):
    """Forces a call of one function."""

    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[list[ToolParam], Meta(max_length=256)]


class TextFormat(Wire, frozen=True, tag="text", tag_field="type"):
    """No constraint."""


class JsonObjectFormat(Wire, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonSchemaSpec(Wire, frozen=True, kw_only=True):
    """A named JSON schema. Output always follows it: `strict` changes nothing."""

    name: ToolName
    schema: JsonObject = msgspec.field(default_factory=dict)
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Wire, frozen=True, tag="json_schema", tag_field="type"):
    """JSON that follows a schema."""

    json_schema: JsonSchemaSpec


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Wire, frozen=True, kw_only=True):
    """vLLM's spelling of constraints: exactly one of the four."""

    json: JsonObject | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    choice: Annotated[list[StopString], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262_144)] | None = None


class StreamOptions(Wire, frozen=True, kw_only=True):
    """`include_usage` adds a last chunk with the usage of the whole request."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024),
]


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """What chat and plain completions share."""

    model: ModelName | None = None
    temperature: OpenAITemperature | None = None
    top_p: Probability | None = None
    presence_penalty: OpenAIPenalty | None = None
    frequency_penalty: OpenAIPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopString | StopList | None = None
    n: Annotated[int, Meta(ge=1, le=32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262_144)] | None = None
    structured_outputs: StructuredOutputs | None = None
    lora: Annotated[list[LoraChoice], Meta(max_length=16)] | None = None
    user: ShortText | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool = False
    store: Literal[False, "none"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
#: A text, several, a list of token ids, or several. A list holds one kind; `translate` checks it.
Prompt = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None


class EmbeddingRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    input: Prompt
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: ShortText | None = None
    keep_alive: KeepAlive | None = None
