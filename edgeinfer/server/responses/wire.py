"""JSON types of OpenAI's Responses API, from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.openai.wire import (
    FunctionTool,
    InputTextPart,
    JsonObjectFormat,
    RefusalPart,
    TextFormat,
    TextPart,
)
from edgeinfer.server.wire_types import (
    Effort,
    GenerationFields,
    JsonObject,
    Probability,
    ReasoningBudget,
    Reply,
    ShortText,
    Temperature,
    Text,
    TokenCount,
    ToolName,
    Wire,
    WireTimings,
)

#: The only supported value of `include`.
LOGPROBS = "message.output_text.logprobs"


class InputImage(Wire, frozen=True, tag="input_image", tag_field="type"):
    """A picture as a `data:` URI. Other URLs are refused."""

    refused: ClassVar[Mapping[str, str]] = {"file_id": "the endpoint stores no files, send a data: URI"}

    image_url: Text


class InputFile(Wire, frozen=True, tag="input_file", tag_field="type"):
    """A PDF, DOCX, HTML or text file, in base64 or as a `data:` URI. Other URLs are refused."""

    refused: ClassVar[Mapping[str, str]] = {
        "file_id": "the endpoint stores no files, send `file_data`",
        "file_url": "URLs are not fetched, send `file_data`",
    }

    file_data: Text
    filename: ShortText = "document"


class OutputText(Wire, frozen=True, tag="output_text", tag_field="type"):
    """Text of an earlier answer."""

    text: Text


class ReasoningText(Wire, frozen=True, tag="reasoning_text", tag_field="type"):
    text: Text


class SummaryText(Wire, frozen=True, tag="summary_text", tag_field="type"):
    text: Text


InputPart = InputTextPart | TextPart | InputImage | InputFile
MessageContent = str | Annotated[list[InputPart | OutputText | RefusalPart], Meta(max_length=1024)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _TurnItem(Wire, frozen=True, kw_only=True):
    id: ShortText | None = None
    status: ItemStatus | None = None


class MessageItem(_TurnItem, frozen=True, tag="message", tag_field="type"):
    """A message. Clients may leave out its `type`."""

    is_untagged_form: ClassVar = True
    other_types: ClassVar[Mapping[str, str]] = {
        "compaction": "only OpenAI can decrypt it",
        "configuration_update": "the configuration cannot change within a request",
        "computer_call": "computer use is not supported",
        "image_generation_call": "image generation is not supported",
        "custom_tool_call": "only function tools are supported",
        "shell_call": "only function tools are supported",
        "local_shell_call": "only function tools are supported",
        "apply_patch_call": "only function tools are supported",
    }
    #: Items of tools that OpenAI's servers run. They are removed, because they contain no text.
    dropped_types: ClassVar = tuple(
        "web_search_call file_search_call code_interpreter_call tool_search_ mcp_ "
        "additional_tools compaction_trigger program".split()
    )

    role: Literal["user", "assistant", "system", "developer"]
    content: MessageContent


class FunctionCallItem(_TurnItem, frozen=True, tag="function_call", tag_field="type"):
    call_id: ShortText
    name: ToolName
    arguments: Text
    namespace: ToolName | None = None


class FunctionOutputItem(_TurnItem, frozen=True, tag="function_call_output", tag_field="type"):
    call_id: ShortText
    output: str | Annotated[list[InputPart], Meta(max_length=1024)] | JsonObject


class ReasoningItem(_TurnItem, frozen=True, tag="reasoning", tag_field="type"):
    """Reasoning of an earlier answer. Without `content`, the model sees `summary`."""

    summary: Annotated[list[SummaryText], Meta(max_length=64)] = msgspec.field(default_factory=list)
    content: Annotated[list[ReasoningText], Meta(max_length=64)] | None = None


class ItemReference(Wire, frozen=True, tag="item_reference", tag_field="type"):
    """A reference to an item of a stored response."""

    id: ShortText


Item = MessageItem | ItemReference | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseFunctionTool(FunctionTool, frozen=True, tag="function", tag_field="type"):
    """A function that the model may call. Tools of other types are ignored."""

    dropped_types: ClassVar = ("",)


class NamespaceTool(Wire, frozen=True, tag="namespace", tag_field="type"):
    """Functions under a common name. The model sees each as `namespace.function`."""

    name: ToolName
    tools: Annotated[list[ResponseFunctionTool], Meta(max_length=256)]


class ChosenFunction(Wire, frozen=True, tag="function", tag_field="type"):
    other_types: ClassVar[Mapping[str, str]] = {
        "": "only function tools are supported",
        "allowed_tools": "send only the allowed tools",
    }
    is_untagged_form: ClassVar = True

    name: ToolName


class SchemaFormat(Wire, frozen=True, tag="json_schema", tag_field="type"):
    name: ToolName
    schema: JsonObject
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Wire, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ReasoningConfig(Wire, frozen=True, kw_only=True):
    """How much the model reasons. `effort` becomes a variable of the chat template."""

    effort: Effort | None = None


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "background": "background mode is not supported",
        "conversation": "conversations are not stored",
        "moderation": "moderation is not supported",
        "prompt": "prompts are not stored",
    }

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseFunctionTool | NamespaceTool], Meta(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    reasoning_budget: ReasoningBudget | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[ShortText], Meta(max_length=64)] | None = None
    store: bool | Literal["none"] | None = None
    previous_response_id: ShortText | None = None


class StoredQuery(Wire, frozen=True, kw_only=True):
    """Query of GET /v1/responses/{id}."""

    refused: ClassVar[Mapping[str, str]] = {
        "starting_after": "streams are not stored, retrieve the finished response"
    }

    stream: Literal["false"] | None = None


class InputDetails(Reply, frozen=True, kw_only=True):
    """Cached tokens of the input. `cached_disk_tokens` is the part that came from the disk."""

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
    namespace: str | msgspec.UnsetType = msgspec.UNSET


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


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/responses."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
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
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    store: bool = False
    background: bool = False
    service_tier: str = "default"
    object: Literal["response"] = "response"
    timings: WireTimings | None = None


class DeletedResponse(Reply, frozen=True, kw_only=True):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
