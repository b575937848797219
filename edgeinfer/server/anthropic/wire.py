"""Anthropic's messages and token counting, as far as a local text model can honour them.

Source: Anthropic's published API reference. `cache_control` is accepted because the engine reuses
prefixes by itself; images, documents, server tools, containers and thinking budgets cannot be honoured
and are refused.
"""

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
    Probability,
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

# --- requests
# --------------------------------------------------------------------------------


class CacheControl(Wire, frozen=True, kw_only=True):
    """A hint where a reusable prefix ends; prefixes are reused with or without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Wire, frozen=True, tag="text", tag_field="type"):
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[list[JsonObject], Meta(max_length=0)] | None = None


class TextOnlyBlock(Wire, frozen=True, kw_only=True):
    """A text block where nothing but text may stand."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[list[JsonObject], Meta(max_length=0)] | None = None


class ThinkingBlock(Wire, frozen=True, tag="thinking", tag_field="type"):
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Wire, frozen=True, tag="tool_use", tag_field="type"):
    id: ShortText
    name: ToolName
    input: JsonObject
    cache_control: CacheControl | None = None


class ToolResultBlock(Wire, frozen=True, tag="tool_result", tag_field="type"):
    tool_use_id: ShortText
    content: str | Annotated[list[TextOnlyBlock], Meta(max_length=1024)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlocks = Annotated[list[TextBlock | ToolResultBlock], Meta(max_length=1024)]
AssistantBlocks = Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock], Meta(max_length=1024)]


class UserTurn(Wire, frozen=True, tag="user", tag_field="role"):
    content: str | UserBlocks


class AssistantTurn(Wire, frozen=True, tag="assistant", tag_field="role"):
    content: str | AssistantBlocks


class SystemTurn(Wire, frozen=True, tag="system", tag_field="role"):
    content: str | Annotated[list[TextOnlyBlock], Meta(max_length=1024)]


class AnthropicTool(Wire, frozen=True, kw_only=True):
    """A client tool; `input_schema` is a JSON schema."""

    name: ToolName
    input_schema: JsonObject
    description: Text | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None


class AutoChoice(Wire, frozen=True, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool = False


class AnyChoice(Wire, frozen=True, tag="any", tag_field="type"):
    disable_parallel_tool_use: bool = False


class OneChoice(Wire, frozen=True, tag="tool", tag_field="type"):
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(Wire, frozen=True, tag="none", tag_field="type"):
    """No tool is called."""


class ThinkingOff(Wire, frozen=True, tag="disabled", tag_field="type"):
    """The model's template is asked for no reasoning."""


class ThinkingAdaptive(Wire, frozen=True, tag="adaptive", tag_field="type"):
    """The model's template is asked for reasoning; the model decides how much."""

    display: Literal["summarized"] | None = None


class Metadata(Wire, frozen=True, kw_only=True):
    user_id: ShortText | None = None


class JsonOutput(Wire, frozen=True, kw_only=True):
    schema: JsonObject
    type: Literal["json_schema"]


class OutputConfig(Wire, frozen=True, kw_only=True):
    format: JsonOutput | None = None


class CountRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[
        list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1, max_length=4096)
    ]
    model: ModelName | None = None
    system: str | Annotated[list[TextOnlyBlock], Meta(max_length=1024)] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=256)] | None = None
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: ThinkingOff | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    keep_alive: KeepAlive | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: TokenCount
    stream: bool = False
    stop_sequences: StopList | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_prompt: CachePrompt = True
    cache_salt: CacheSalt | None = None
    deadline_s: Deadline | None = None


# --- responses
# --------------------------------------------------------------------------------


class AnthropicErrorBody(Reply, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicError(Reply, frozen=True, kw_only=True):
    """Anthropic's error envelope."""

    error: AnthropicErrorBody
    type: Literal["error"] = "error"
    request_id: str = ""


class TextOut(Reply, frozen=True, tag="text", tag_field="type"):
    text: str
    citations: None = None


class ThinkingOut(Reply, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseOut(Reply, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Reply, frozen=True, kw_only=True):
    """`input_tokens` were prefilled, `cache_read_input_tokens` were remembered.

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
