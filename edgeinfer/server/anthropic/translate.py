"""Convert requests of Anthropic's API to requests of the engine. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from edgeinfer.media import document_files
from edgeinfer.media.pictures import from_base64
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Message, Tool, ToolCall, ToolChoice
from edgeinfer.server.anthropic import wire
from edgeinfer.server.request_fields import (
    as_text,
    check_choice,
    common_fields,
    content_of,
    make_tools,
    override_sampling,
    reasoning,
    stop_strings,
)

#: Matches names of tools with which a client lets the model search for deferred tools.
_SEARCH = re.compile(r"tool.?search|(search|find).?tool", re.IGNORECASE)
_Texts = wire.TextBlock | wire.DocumentBlock | wire.ToolReferenceBlock
_Blocks = _Texts | wire.ImageBlock


def messages_request(body: wire.MessagesRequest, info: EngineInfo) -> GenerateRequest:
    """Convert POST /v1/messages. A final assistant turn is continued. Raises InvalidRequestError."""
    tools = tools_of(body)
    form = body.output_config.format if body.output_config else None
    return GenerateRequest(
        messages=conversation(body),
        tools=tools,
        tool_choice=check_choice(_tool_choice(body), tools, "any"),
        **_thinking(body),
        continue_final=isinstance(body.messages[-1], wire.AssistantTurn),
        sampling=override_sampling(
            info.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
        ),
        max_tokens=body.max_tokens,
        stop=stop_strings(body.stop_sequences),
        constraint=None if form is None else JsonSchema(form.schema),
        **common_fields(body),
    )


def conversation(body: wire.CountRequest) -> tuple[Message, ...]:
    """Convert the conversation to messages. Tool results in a user turn become messages before it."""
    turns: list[Message] = []
    if body.system:
        turns.append(Message(role="system", content=_join_texts(body.system)))
    for turn in body.messages:
        match turn:
            case wire.UserTurn():
                turns += _user(turn)
            case wire.AssistantTurn():
                turns.append(_assistant(turn))
            case wire.SystemTurn():
                turns.append(Message(role="system", content=_join_texts(turn.content)))
    return tuple(turns)


def tools_of(body: wire.CountRequest) -> tuple[Tool, ...]:
    """Return the tools that the model sees.

    Tools with `defer_loading` are left out until a tool result refers to them. Without a client's tool
    that searches for them (Anthropic's own does not run here), the model sees all.
    """
    referred = _referenced_names(body)
    searches = any(_SEARCH.search(tool.name) for tool in body.tools or () if not tool.defer_loading)
    return make_tools(
        (tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in body.tools or ()
        if not (tool.defer_loading and searches) or tool.name in referred
    )


def _referenced_names(body: wire.CountRequest) -> set[str]:
    names = {body.tool_choice.name} if isinstance(body.tool_choice, wire.OneChoice) else set()
    for turn in body.messages:
        blocks = () if isinstance(turn.content, str) else turn.content
        for block in blocks:
            if isinstance(block, wire.ToolUseBlock):
                names.add(block.name)
            elif isinstance(block, wire.ToolResultBlock) and not isinstance(block.content, str):
                references = (b for b in block.content or () if isinstance(b, wire.ToolReferenceBlock))
                names |= {reference.tool_name for reference in references}
    return names


def _user(turn: wire.UserTurn) -> list[Message]:
    if isinstance(turn.content, str):
        return [Message(role="user", content=turn.content)]
    results = [block for block in turn.content if isinstance(block, wire.ToolResultBlock)]
    blocks = [block for block in turn.content if not isinstance(block, wire.ToolResultBlock)]
    turns = [
        Message(role="tool", tool_call_id=block.tool_use_id, **_result(block)) for block in results
    ]
    if blocks or not results:
        turns.append(Message(role="user", **content_of(blocks, _pieces, "\n")))
    return turns


def _pieces(block: _Blocks) -> Sequence[str | bytes]:
    match block:
        case wire.ImageBlock(source=source):
            return [from_base64(source.data)]
        case wire.DocumentBlock(source=wire.FileSource(data=data), title=title, context=context):
            return [*filter(None, [context]), *document_files.parts_of(data, title or "document")]
    return [_text(block)]


def _text(block: _Texts) -> str:
    match block:
        case wire.TextBlock(text=text):
            return text
        case wire.ToolReferenceBlock(tool_name=name):
            return f"The tool {name} is there now."
        case wire.DocumentBlock(source=source):
            content = source.content if isinstance(source, wire.BlocksSource) else source.data
            return "\n".join(filter(None, [block.title, block.context, _join_texts(content)]))


def _result(block: wire.ToolResultBlock) -> dict[str, Any]:
    fields = content_of(block.content or "", _pieces, "\n")
    return fields | {"content": f"Error: {fields['content']}"} if block.is_error else fields


def _assistant(turn: wire.AssistantTurn) -> Message:
    if isinstance(turn.content, str):
        return Message(role="assistant", content=turn.content)
    text = thought = ""
    calls = []
    for block in turn.content:
        match block:
            case wire.TextBlock():
                text += block.text
            case wire.ThinkingBlock():
                thought += block.thinking
            case wire.ToolUseBlock():
                calls.append(ToolCall(id=block.id, name=block.name, arguments=as_text(block.input)))
    return Message(role="assistant", content=text, reasoning=thought, tool_calls=tuple(calls))


def _join_texts(content: str | Sequence[_Texts]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text, content))


def _tool_choice(body: wire.CountRequest) -> ToolChoice:
    match body.tool_choice:
        case None:
            return ToolChoice()
        case wire.NoChoice():
            return ToolChoice(mode="none")
        case wire.OneChoice(name=name, disable_parallel_tool_use=is_single):
            return ToolChoice(mode="named", name=name, parallel=not is_single)
        case wire.AnyChoice(disable_parallel_tool_use=is_single):
            return ToolChoice(mode="required", parallel=not is_single)
        case wire.AutoChoice(disable_parallel_tool_use=is_single):
            return ToolChoice(parallel=not is_single)


def _thinking(body: wire.CountRequest) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    match body.thinking:
        case None:
            return reasoning(effort)
        case wire.ThinkingOn(budget_tokens=budget):
            return reasoning(effort, enabled=True, budget=budget)
    return reasoning(effort, enabled=not isinstance(body.thinking, wire.ThinkingOff))
