"""Answers of OpenAI's Responses API (its OpenAPI document); `cached_disk_tokens` is ours."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgeinfer.server.core.wire import Reply, WireTimings
from edgeinfer.server.responses.wire import ItemStatus


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
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ReasoningTextOut(Reply, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class ReasoningOut(Reply, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    content: list[ReasoningTextOut]
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    status: ItemStatus = "completed"


OutputItem = MessageOut | FunctionCallOut | ReasoningOut


class InputTokensReply(Reply, frozen=True, kw_only=True):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


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
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
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
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    store: bool = False
    background: bool = False
    service_tier: str = "default"
    object: Literal["response"] = "response"
    timings: WireTimings | None = None


class InputItems(Reply, frozen=True, kw_only=True):
    """The items that a stored response answers."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(Reply, frozen=True, kw_only=True):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
