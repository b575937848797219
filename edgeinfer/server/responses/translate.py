"""OpenAI's Responses wire types → the engine's requests. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    JsonSchema,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)
from edgeinfer.server.core.problems import from_validation
from edgeinfer.server.core.request_parts import (
    caching,
    named_tool,
    overridden,
    required_tool,
    template_options,
    unique_tools,
)
from edgeinfer.server.responses import wire

_Item = wire.MessageItem | wire.FunctionCallItem | wire.FunctionOutputItem | wire.ReasoningItem
_ITEMS: dict[str, type[_Item]] = {
    "message": wire.MessageItem,
    "function_call": wire.FunctionCallItem,
    "function_call_output": wire.FunctionOutputItem,
    "reasoning": wire.ReasoningItem,
}


def response_request(body: wire.ResponsesRequest, info: EngineInfo) -> GenerateRequest:
    """One request. Raises InvalidRequestError and Problem, each naming the place."""
    tools = unique_tools(
        tuple(
            Tool(name=t.name, description=t.description or "", parameters=t.parameters or {})
            for t in body.tools or ()
        )
    )
    wants_logprobs = bool(body.include) or body.top_logprobs is not None
    return GenerateRequest(
        messages=conversation(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        template_options=template_options(None, body.reasoning.effort if body.reasoning else None),
        sampling=overridden(info.sampling, temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens,
        constraint=_constraint(body),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        overflow="shift" if body.truncation == "auto" else "refuse",
        deadline_s=body.deadline_s,
        **caching(body),
    )


def conversation(body: wire.ResponsesRequest) -> tuple[Message, ...]:
    """Instructions and items as turns; calls and reasoning join the assistant's turn they belong to."""
    turns: list[Message] = []
    if body.instructions:
        turns.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return (*turns, Message(role="user", content=body.input))
    for place, item in enumerate(body.input):
        _append(turns, _item(item, place))
    return tuple(turns)


def _item(raw: dict[str, Any], place: int) -> _Item:
    kind = raw.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequestError(
            f"input items of type '{kind}' are not supported", param=f"input[{place}].type"
        )
    try:
        return msgspec.convert(raw, _ITEMS[kind])
    except msgspec.ValidationError as error:
        problem = from_validation(error)
        problem.param = f"input[{place}]" + (f".{problem.param}" if problem.param else "")
        raise problem from error


def _append(turns: list[Message], item: _Item) -> None:
    match item:
        case wire.MessageItem():
            turns.append(
                Message(
                    role=item.role,
                    content=_text(item.content),
                    reasoning=_pending_reasoning(turns, item),
                )
            )
        case wire.FunctionOutputItem():
            turns.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        case wire.ReasoningItem():
            text = "".join(part.text for part in item.content or ())
            turns.append(Message(role="assistant", reasoning=text))
        case wire.FunctionCallItem():
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            last = turns[-1] if turns and turns[-1].role == "assistant" else None
            if last is None:
                turns.append(Message(role="assistant", tool_calls=(call,)))
            else:
                turns[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call))


def _pending_reasoning(turns: list[Message], item: wire.MessageItem) -> str:
    """The reasoning item just before an assistant's message belongs to it."""
    if (
        item.role == "assistant"
        and turns
        and turns[-1].role == "assistant"
        and not turns[-1].content
        and not turns[-1].tool_calls
    ):
        return turns.pop().reasoning
    return ""


def _text(content: str | Sequence[wire.InputText | wire.OutputText] | Sequence[wire.InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_choice(body: wire.ResponsesRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, wire.ChosenFunction):
        return named_tool(body.tool_choice.name, parallel, tools)
    if body.tool_choice == "required":
        return required_tool("required", parallel, tools)
    return ToolChoice(mode=body.tool_choice or "auto", parallel=parallel)


def _constraint(body: wire.ResponsesRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case wire.AnyJson():
            return JsonSchema({"type": "object"})
        case wire.SchemaFormat(schema=schema):
            return JsonSchema(schema)
    return None
