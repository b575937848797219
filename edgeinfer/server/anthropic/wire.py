"""JSON types of Anthropic's Messages API, as far as a local model supports it.

Source: Anthropic's API reference, with its beta fields. `cache_control` is ignored, because the engine
always uses the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.wire_types import (
    GenerationFields,
    JsonObject,
    Probability,
    ReasoningBudget,
    Reply,
    ShortText,
    StopList,
    Temperature,
    Text,
    TokenCount,
    ToolName,
    TopK,
    Wire,
    WireTimings,
)


class TextBlock(Wire, frozen=True, tag="text", tag_field="type"):
    other_types: ClassVar[Mapping[str, str]] = {
        "image": "only user turns and tool results may contain it",
        "container_upload": "containers are not supported",
        "browser_state": "there is no browser tool",
        "search_result": "send the search results as text",
        "compaction": "conversations are not summarized",
        "mcp_tool_use": "the endpoint calls no MCP servers",
        "mcp_tool_result": "the endpoint calls no MCP servers",
        # each of these blocks is accepted in one kind of turn: e.g. `document` is refused in assistant
        # turns
        "thinking": "only assistant turns may contain it",
        "tool_use": "only assistant turns may contain it",
        "tool_result": "only user turns may contain it",
        "document": "only user turns may contain it",
    }
    #: Types of content blocks about tools that run on Anthropic's servers. Such blocks are removed from
    #: the conversation.
    dropped_types: ClassVar = tuple(
        "server_tool_use web_search_tool_result web_fetch_tool_result "
        "code_execution_tool_result bash_code_execution_tool_result "
        "text_editor_code_execution_tool_result tool_search_tool_result advisor_tool_result "
        "mcp_tool_listing redacted_thinking fallback tool_addition tool_removal".split()
    )

    text: Text


class PlainSource(Wire, frozen=True, tag="text", tag_field="type"):
    """A document given as plain text."""

    data: Text


class FileSource(Wire, frozen=True, tag="base64", tag_field="type"):
    """A picture or a document (PDF, DOCX, text) in base64. The format is detected from the content."""

    other_types: ClassVar[Mapping[str, str]] = {
        "url": "the endpoint fetches nothing",
        "file": "the endpoint stores no files",
    }

    data: Text


class BlocksSource(Wire, frozen=True, tag="content", tag_field="type"):
    """A document given as blocks of text."""

    content: str | Annotated[list[TextBlock], Meta(max_length=1024)]


class DocumentBlock(Wire, frozen=True, tag="document", tag_field="type"):
    """A document. The model sees its title and context before its text."""

    source: PlainSource | BlocksSource | FileSource
    title: Text | None = None
    context: Text | None = None


class ImageBlock(Wire, frozen=True, tag="image", tag_field="type"):
    refused: ClassVar[Mapping[str, str]] = {"transformations": "pictures are not transformed"}

    source: FileSource


class ThinkingBlock(Wire, frozen=True, tag="thinking", tag_field="type"):
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Wire, frozen=True, tag="tool_use", tag_field="type"):
    id: ShortText
    name: ToolName
    input: JsonObject


class ToolReferenceBlock(Wire, frozen=True, tag="tool_reference", tag_field="type"):
    """The name of a tool that a tool search found. The model sees the tool from this message on."""

    tool_name: ToolName


ResultBlocks = Annotated[
    list[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock], Meta(max_length=1024)
]


class ToolResultBlock(Wire, frozen=True, tag="tool_result", tag_field="type"):
    tool_use_id: ShortText
    content: str | ResultBlocks | None = None
    is_error: bool | None = None


UserBlocks = Annotated[
    list[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock], Meta(max_length=1024)
]
AssistantBlocks = Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock], Meta(max_length=1024)]
SystemBlocks = Annotated[list[TextBlock], Meta(max_length=1024)]


class UserTurn(Wire, frozen=True, tag="user", tag_field="role"):
    content: str | UserBlocks


class AssistantTurn(Wire, frozen=True, tag="assistant", tag_field="role"):
    content: str | AssistantBlocks


class SystemTurn(Wire, frozen=True, tag="system", tag_field="role"):
    content: str | SystemBlocks


class AnthropicTool(Wire, frozen=True, tag="custom", tag_field="type"):
    """A tool of the client. Tools of other types, which Anthropic defines, are ignored.

    The model does not see a tool with `defer_loading` until a block `tool_reference` or `tool_use` has
    named the tool, provided that the client has another tool to search for tools.
    """

    dropped_types: ClassVar = ("",)
    is_untagged_form: ClassVar = True

    name: ToolName
    input_schema: JsonObject
    description: Text | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class AutoChoice(Wire, frozen=True, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool = False


class AnyChoice(AutoChoice, frozen=True, tag="any", tag_field="type"):
    """`tool_choice`: the model must call one of the tools."""


class OneChoice(AutoChoice, frozen=True, kw_only=True, tag="tool", tag_field="type"):
    name: ToolName


class NoChoice(Wire, frozen=True, tag="none", tag_field="type"):
    """`tool_choice`: the model must not call a tool."""


class ThinkingOff(Wire, frozen=True, tag="disabled", tag_field="type"):
    """`thinking`: switch reasoning off."""


class ThinkingAdaptive(Wire, frozen=True, tag="adaptive", tag_field="type"):
    """`thinking`: switch reasoning on; the model decides how much it reasons."""


class ThinkingBetweenTools(Wire, frozen=True, tag="between_tools", tag_field="type"):
    """`thinking`: treated like `adaptive`, as local models cannot be told to reason between calls."""


class ThinkingOn(Wire, frozen=True, tag="enabled", tag_field="type"):
    """`thinking`: switch reasoning on, for at most `budget_tokens` tokens."""

    budget_tokens: ReasoningBudget | None = None


class JsonOutput(Wire, frozen=True, tag="json_schema", tag_field="type"):
    schema: JsonObject


class OutputConfig(Wire, frozen=True, kw_only=True):
    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens, to count the tokens of a conversation."""

    refused: ClassVar[Mapping[str, str]] = {
        "compaction": "conversations are not summarized",
        "container": "containers are not supported",
        "mcp_servers": "the endpoint calls no MCP servers",
        "thread": "conversations are not stored",
    }

    messages: Annotated[
        list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1, max_length=4096)
    ]
    system: str | SystemBlocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=256)] | None = None
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: ThinkingOff | ThinkingAdaptive | ThinkingBetweenTools | ThinkingOn | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: TokenCount
    stream: bool = False
    stop_sequences: StopList | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None


class AnthropicErrorBody(Reply, frozen=True, kw_only=True):
    """Anthropic's error. `details` tell the official client which unsupported field to leave out."""

    type: str
    message: str
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(Reply, frozen=True, kw_only=True):
    """Anthropic's error response."""

    error: AnthropicErrorBody
    type: Literal["error"] = "error"
    request_id: str = ""


class TextOut(Reply, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingOut(Reply, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseOut(Reply, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Reply, frozen=True, kw_only=True):
    """Token counts. `input_tokens` were prefilled, `cache_read_input_tokens` were in the prefix cache.

    `cache_read_disk_input_tokens` (a field of edgeinfer) is the part of `cache_read_input_tokens` that
    came from the disk. `cache_creation_input_tokens` is always 0.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_read_disk_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/messages."""

    id: str
    model: str
    content: list[TextOut | ThinkingOut | ToolUseOut]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET


class TokenCountReply(Reply, frozen=True, kw_only=True):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int
