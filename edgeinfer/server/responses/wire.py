"""OpenAI's Responses API (its OpenAPI document), stateless: what stores is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.core.wire import (
    CachePrompt,
    CacheSalt,
    Deadline,
    JsonObject,
    KeepAlive,
    ModelName,
    OpenAITemperature,
    Probability,
    Reply,
    ShortText,
    Text,
    TokenCount,
    ToolName,
    Wire,
    WireTimings,
)

# --- requests
# --------------------------------------------------------------------------------


class InputText(Wire, frozen=True, tag="input_text", tag_field="type"):
    text: Text


class OutputText(Wire, frozen=True, tag="output_text", tag_field="type"):
    """An earlier answer's text, as our own responses spell it."""

    text: Text
    annotations: Annotated[list[JsonObject], Meta(max_length=0)] = msgspec.field(default_factory=list)
    logprobs: list[JsonObject] | None = None


class ReasoningText(Wire, frozen=True, tag="reasoning_text", tag_field="type"):
    text: Text


MessageContent = str | Annotated[list[InputText | OutputText], Meta(max_length=1024)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Wire, frozen=True, kw_only=True):
    """A turn; its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: MessageContent
    type: Literal["message"] = "message"
    id: ShortText | None = None
    status: ItemStatus | None = None
    phase: None = None


class FunctionCallItem(Wire, frozen=True, tag="function_call", tag_field="type"):
    call_id: ShortText
    name: ToolName
    arguments: Text
    id: ShortText | None = None
    status: ItemStatus | None = None


class FunctionOutputItem(Wire, frozen=True, tag="function_call_output", tag_field="type"):
    call_id: ShortText
    output: str | Annotated[list[InputText], Meta(max_length=1024)]
    id: ShortText | None = None
    status: ItemStatus | None = None


class ReasoningItem(Wire, frozen=True, tag="reasoning", tag_field="type"):
    summary: Annotated[list[JsonObject], Meta(max_length=0)] = msgspec.field(default_factory=list)
    content: Annotated[list[ReasoningText], Meta(max_length=64)] | None = None
    id: ShortText | None = None
    status: ItemStatus | None = None
    encrypted_content: None = None


class ResponseFunctionTool(Wire, frozen=True, kw_only=True):
    name: ToolName
    type: Literal["function"]
    parameters: JsonObject | None = None
    description: Text | None = None
    strict: bool | None = None


class ChosenFunction(Wire, frozen=True, kw_only=True):
    name: ToolName
    type: Literal["function"]


class PlainText(Wire, frozen=True, tag="text", tag_field="type"):
    """No constraint."""


class AnyJson(Wire, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class SchemaFormat(Wire, frozen=True, tag="json_schema", tag_field="type"):
    name: ToolName
    schema: JsonObject
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Wire, frozen=True, kw_only=True):
    format: PlainText | AnyJson | SchemaFormat | None = None


class ReasoningConfig(Wire, frozen=True, kw_only=True):
    """`effort` reaches the model's chat template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesStreamOptions(Wire, frozen=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/responses.

    `input` items are checked one by one after the body, so that each error names its place.
    """

    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=4096)]
    model: ModelName | None = None
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: OpenAITemperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[ResponseFunctionTool], Meta(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Meta(max_length=1)] | None = None
    store: Literal[False, "none"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    service_tier: Literal["auto", "default"] | None = None
    user: ShortText | None = None
    cache_prompt: CachePrompt = True
    cache_salt: CacheSalt | None = None
    deadline_s: Deadline | None = None
    keep_alive: KeepAlive | None = None


# --- responses
# --------------------------------------------------------------------------------


class InputDetails(Reply, frozen=True, kw_only=True):
    """Of `cached_tokens`, `cached_disk_tokens` came from the disk; that field is ours."""

    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Reply, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(Reply, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class OutputTextOut(Reply, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    logprobs: list[dict[str, Any]] = msgspec.field(default_factory=list)


class MessageOut(Reply, frozen=True, tag="message", tag_field="type"):
    id: str
    content: list[OutputTextOut]
    status: ItemStatus = "completed"
    role: Literal["assistant"] = "assistant"


class FunctionCallOut(Reply, frozen=True, tag="function_call", tag_field="type"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class ReasoningTextOut(Reply, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class ReasoningOut(Reply, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    content: list[ReasoningTextOut]
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    status: ItemStatus = "completed"


OutputItem = MessageOut | FunctionCallOut | ReasoningOut


class IncompleteDetails(Reply, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(Reply, frozen=True, kw_only=True):
    code: str
    message: str


class ResponseReply(Reply, frozen=True, kw_only=True):
    """The answer of /v1/responses."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    truncation: str
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    previous_response_id: None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    store: bool = False
    background: bool = False
    service_tier: str = "default"
    object: Literal["response"] = "response"
    timings: WireTimings | None = None
