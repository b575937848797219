"""Anthropic's messages and token counting, as far as a local text model can honour them.

Source: Anthropic's published API reference, its beta fields included. `cache_control` is a hint because
the engine reuses prefixes by itself.
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

_CACHE = frozenset({"cache_control"})
#: Block types that only Anthropic's own tools leave in a conversation; a local model does not know
#: them.
_SERVER_BLOCKS = tuple(
    "server_tool_use web_search_tool_result web_fetch_tool_result "
    "code_execution_tool_result bash_code_execution_tool_result "
    "text_editor_code_execution_tool_result tool_search_tool_result advisor_tool_result "
    "mcp_tool_listing redacted_thinking fallback tool_addition tool_removal".split()
)
_OTHER_BLOCKS = {
    "image": "only a user's turn and a tool's result have it",
    "container_upload": "there are no containers",
    "browser_state": "there is no browser",
    "search_result": "send what was found as text",
    "compaction": "conversations are not summed up",
    "mcp_tool_use": "MCP servers are not called",
    "mcp_tool_result": "MCP servers are not called",
    # types that are read where they belong
    "thinking": "only an assistant's turn has it",
    "tool_use": "only an assistant's turn has it",
    "tool_result": "only a user's turn has it",
    "document": "only a user's turn has it",
}


class TextBlock(Wire, frozen=True, tag="text", tag_field="type"):
    hints: ClassVar = _CACHE | {"citations"}
    other_types: ClassVar[Mapping[str, str]] = _OTHER_BLOCKS
    dropped_types: ClassVar = _SERVER_BLOCKS

    text: Text


class PlainSource(Wire, frozen=True, tag="text", tag_field="type"):
    """A document as text."""

    hints: ClassVar = frozenset({"media_type"})

    data: Text


class FileSource(Wire, frozen=True, tag="base64", tag_field="type"):
    """A document's file (PDF, DOCX or text) or a picture's; its first bytes say which format it has."""

    hints: ClassVar = frozenset({"media_type"})
    other_types: ClassVar[Mapping[str, str]] = {
        "url": "nothing is fetched",
        "file": "no files are stored",
    }

    data: Text


class BlocksSource(Wire, frozen=True, tag="content", tag_field="type"):
    """A document as blocks of text."""

    content: str | Annotated[list[TextBlock], Meta(max_length=1024)]


class DocumentBlock(Wire, frozen=True, tag="document", tag_field="type"):
    """A document; its title and context stand before its text."""

    hints: ClassVar = _CACHE | {"citations"}

    source: PlainSource | BlocksSource | FileSource
    title: Text | None = None
    context: Text | None = None


class ImageBlock(Wire, frozen=True, tag="image", tag_field="type"):
    hints: ClassVar = _CACHE
    refused: ClassVar[Mapping[str, str]] = {"transformations": "pictures are read as they are"}

    source: FileSource


class ThinkingBlock(Wire, frozen=True, tag="thinking", tag_field="type"):
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Wire, frozen=True, tag="tool_use", tag_field="type"):
    hints: ClassVar = _CACHE | {"caller", "toolset_name"}

    id: ShortText
    name: ToolName
    input: JsonObject


class ToolReferenceBlock(Wire, frozen=True, tag="tool_reference", tag_field="type"):
    """A search for tools found this one: from here on it is offered."""

    hints: ClassVar = _CACHE

    tool_name: ToolName


ResultBlocks = Annotated[
    list[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock], Meta(max_length=1024)
]


class ToolResultBlock(Wire, frozen=True, tag="tool_result", tag_field="type"):
    hints: ClassVar = _CACHE | {"toolset_name"}

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
    hints: ClassVar = frozenset({"clear_at", "output_config"})

    content: str | SystemBlocks


class AnthropicTool(Wire, frozen=True, tag="custom", tag_field="type"):
    """A client's tool with a JSON schema; those that Anthropic defines are left out of the offer.

    With `defer_loading` it is offered once a `tool_reference` names it.
    """

    hints: ClassVar = _CACHE | {"eager_input_streaming", "input_examples", "allowed_callers"}
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
    """Some tool is called."""


class OneChoice(AutoChoice, frozen=True, kw_only=True, tag="tool", tag_field="type"):
    name: ToolName


class NoChoice(Wire, frozen=True, tag="none", tag_field="type"):
    """No tool is called."""


class ThinkingOff(Wire, frozen=True, tag="disabled", tag_field="type"):
    """The model's template is asked for no reasoning."""


class ThinkingAdaptive(Wire, frozen=True, tag="adaptive", tag_field="type"):
    """The model's template is asked for reasoning; the model decides how much."""

    hints: ClassVar = frozenset({"display", "block_binding"})


class ThinkingBetweenTools(Wire, frozen=True, tag="between_tools", tag_field="type"):
    """Treated as adaptive: a local model decides by itself when it reasons."""


class ThinkingOn(Wire, frozen=True, tag="enabled", tag_field="type"):
    """The model's template is asked for reasoning, which is closed after `budget_tokens`."""

    hints: ClassVar = frozenset({"display", "block_binding"})

    budget_tokens: ReasoningBudget | None = None


class JsonOutput(Wire, frozen=True, tag="json_schema", tag_field="type"):
    schema: JsonObject


class OutputConfig(Wire, frozen=True, kw_only=True):
    hints: ClassVar = frozenset({"task_budget"})

    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens; the body is a request that is going to be sent."""

    hints: ClassVar = _CACHE | frozenset(
        "betas billing_policy context_management diagnostics fallback_credit_token fallbacks "
        "inference_geo metadata service_tier speed user_profile_id workspace_id".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        "compaction": "conversations are not summed up",
        "container": "there are no containers",
        "mcp_servers": "MCP servers are not called",
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
    """POST /v1/messages."""

    max_tokens: TokenCount
    stream: bool = False
    stop_sequences: StopList | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None


class AnthropicErrorBody(Reply, frozen=True, kw_only=True):
    """`details` are for a client that retries by itself without the unsupported part."""

    type: str
    message: str
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(Reply, frozen=True, kw_only=True):
    """Anthropic's error envelope."""

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
    """`input_tokens` were prefilled, `cache_read_input_tokens` were cached.

    Of these, `cache_read_disk_input_tokens` came from the disk; that field is ours.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_read_disk_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageReply(Reply, frozen=True, kw_only=True):
    """The answer of /v1/messages."""

    id: str
    model: str
    content: list[TextOut | ThinkingOut | ToolUseOut]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET


class TokenCountReply(Reply, frozen=True, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
