"""Anthropic's wire types → the engine's requests. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Message, Tool, ToolCall, ToolChoice
from edgeinfer.server.anthropic import wire
from edgeinfer.server.core.request_parts import (
    caching,
    named_tool,
    overridden,
    required_tool,
    stop_strings,
    unique_tools,
)


def messages_request(body: wire.MessagesRequest, info: EngineInfo) -> GenerateRequest:
    """Make one request, continuing a last assistant turn. Raises InvalidRequestError."""
    tools = tools_of(body)
    form = body.output_config.format if body.output_config else None
    return GenerateRequest(
        messages=conversation(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        template_options=_thinking(body),
        continue_final=isinstance(body.messages[-1], wire.AssistantTurn),
        sampling=overridden(
            info.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
        ),
        max_tokens=body.max_tokens,
        stop=stop_strings(body.stop_sequences),
        constraint=None if form is None else JsonSchema(form.schema),
        deadline_s=body.deadline_s,
        **caching(body),
    )


def conversation(body: wire.CountRequest) -> tuple[Message, ...]:
    """Make turns; a user turn's tool results become turns before its text."""
    turns: list[Message] = []
    if body.system:
        turns.append(Message(role="system", content=_joined(body.system, "\n")))
    for place, turn in enumerate(body.messages):
        match turn:
            case wire.UserTurn():
                turns += _user(turn)
            case wire.AssistantTurn():
                turns.append(_assistant(turn, place))
            case wire.SystemTurn():
                turns.append(Message(role="system", content=_joined(turn.content, "\n")))
    return tuple(turns)


def tools_of(body: wire.CountRequest) -> tuple[Tool, ...]:
    tools = tuple(
        Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
        for tool in body.tools or ()
    )
    return unique_tools(tools)


def _user(turn: wire.UserTurn) -> list[Message]:
    if isinstance(turn.content, str):
        return [Message(role="user", content=turn.content)]
    results = [block for block in turn.content if isinstance(block, wire.ToolResultBlock)]
    texts = [block.text for block in turn.content if isinstance(block, wire.TextBlock)]
    said = [
        Message(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
        for block in results
    ]
    if texts or not results:
        said.append(Message(role="user", content="\n".join(texts)))
    return said


def _result(block: wire.ToolResultBlock) -> str:
    text = "" if block.content is None else _joined(block.content, "\n")
    return f"Error: {text}" if block.is_error else text


def _assistant(turn: wire.AssistantTurn, place: int) -> Message:
    if isinstance(turn.content, str):
        return Message(role="assistant", content=turn.content)
    if not turn.content:
        raise InvalidRequestError("an assistant turn needs content", param=f"messages[{place}].content")
    calls = tuple(
        ToolCall(id=block.id, name=block.name, arguments=msgspec.json.encode(block.input).decode())
        for block in turn.content
        if isinstance(block, wire.ToolUseBlock)
    )
    return Message(
        role="assistant",
        content="".join(block.text for block in turn.content if isinstance(block, wire.TextBlock)),
        reasoning="".join(
            block.thinking for block in turn.content if isinstance(block, wire.ThinkingBlock)
        ),
        tool_calls=calls,
    )


def _joined(content: str | Sequence[wire.TextOnlyBlock], between: str) -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)


def _tool_choice(body: wire.CountRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    match body.tool_choice:
        case None:
            return ToolChoice()
        case wire.NoChoice():
            return ToolChoice(mode="none")
        case wire.OneChoice(name=name, disable_parallel_tool_use=alone):
            return named_tool(name, not alone, tools)
        case wire.AnyChoice(disable_parallel_tool_use=alone):
            return required_tool("any", not alone, tools)
        case wire.AutoChoice(disable_parallel_tool_use=alone):
            return ToolChoice(parallel=not alone)


def _thinking(body: wire.CountRequest) -> dict[str, Any]:
    if body.thinking is None:
        return {}
    return {"enable_thinking": isinstance(body.thinking, wire.ThinkingAdaptive)}
