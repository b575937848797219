"""Convert requests of OpenAI's Responses API to requests of the engine. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from edgeinfer.media import document_files
from edgeinfer.media.pictures import from_base64
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
from edgeinfer.server.openai.wire import JsonObjectFormat, RefusalPart
from edgeinfer.server.request_fields import (
    as_text,
    check_choice,
    common_fields,
    content_of,
    make_tools,
    override_sampling,
    reasoning,
)
from edgeinfer.server.responses import wire


def response_request(body: wire.ResponsesRequest, info: EngineInfo) -> GenerateRequest:
    """Convert POST /v1/responses. Raises InvalidRequestError, which names the field."""
    tools = tools_of(body)
    wants_logprobs = wire.LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    return GenerateRequest(
        messages=conversation(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        **reasoning(body.reasoning.effort if body.reasoning else None, budget=body.reasoning_budget),
        sampling=override_sampling(info.sampling, temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens,
        constraint=_constraint(body),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        overflow="shift" if body.truncation == "auto" else "refuse",
        **common_fields(body),
    )


def conversation(body: wire.ResponsesRequest) -> tuple[Message, ...]:
    """Convert instructions and items to messages. Reasoning and calls join the assistant's message."""
    turns: list[Message] = []
    if body.instructions:
        turns.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return (*turns, Message(role="user", content=body.input))
    for item in body.input:
        _append(turns, item)
    return tuple(turns)


def shown_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function: `name`, or `namespace.name`."""
    return f"{namespace}.{name}" if namespace else name


def functions_of(
    body: wire.ResponsesRequest,
) -> Iterator[tuple[str, str | None, wire.ResponseFunctionTool]]:
    """Yield (name that the model sees, namespace or None, function) for each function tool."""
    for tool in body.tools or ():
        if isinstance(tool, wire.NamespaceTool):
            yield from ((shown_name(tool.name, f.name), tool.name, f) for f in tool.tools)
        else:
            yield tool.name, None, tool


def tools_of(body: wire.ResponsesRequest) -> tuple[Tool, ...]:
    """Convert the function tools. Raises InvalidRequestError if two have the same name."""
    return make_tools(
        (name, f.description, f.parameters, f.strict) for name, _, f in functions_of(body)
    )


def _model_name(name: str, body: wire.ResponsesRequest) -> str:
    """Return the name under which the model sees the function that a client calls `name`.

    `tool_choice` has no namespace: "search" stands for "web.search" if there is such a function.
    """
    shown_names = [shown for shown, _, f in functions_of(body) if name in (shown, f.name)]
    return name if name in shown_names else next(iter(shown_names), name)


def _append(turns: list[Message], item: wire.Item) -> None:
    match item:
        case wire.MessageItem():
            thought = _pending_reasoning(turns, item)
            content = content_of(item.content, _pieces)
            turns.append(Message(role=item.role, reasoning=thought, **content))
        case wire.FunctionOutputItem():
            output = as_text(item.output) if isinstance(item.output, dict) else item.output
            turns.append(Message(role="tool", tool_call_id=item.call_id, **content_of(output, _pieces)))
        case wire.ReasoningItem():
            text = "".join(piece.text for piece in item.content or item.summary)
            turns.append(Message(role="assistant", reasoning=text))
        case wire.FunctionCallItem():
            name = shown_name(item.namespace, item.name)
            call = ToolCall(id=item.call_id, name=name, arguments=item.arguments)
            last = turns[-1] if turns and turns[-1].role == "assistant" else None
            if last is None:
                turns.append(Message(role="assistant", tool_calls=(call,)))
            else:
                turns[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call))


def _pending_reasoning(turns: list[Message], item: wire.MessageItem) -> str:
    """Remove the reasoning before an assistant's message from `turns` and return it; "" if none."""
    last = turns[-1] if turns and item.role == "assistant" else None
    if last is None or last.role != "assistant" or last.content or last.tool_calls:
        return ""
    return turns.pop().reasoning


_Part = wire.InputText | wire.InputImage | wire.InputFile | wire.OutputText | RefusalPart


def _pieces(item: _Part) -> Sequence[str | bytes]:
    match item:
        case wire.InputImage(image_url=url):
            return [from_base64(url)]
        case wire.InputFile(file_data=data, filename=name):
            return document_files.parts_of(data, name)
        case RefusalPart(refusal=refusal):
            return [refusal]
    return [item.text]


def _tool_choice(body: wire.ResponsesRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    parallel, choice = body.parallel_tool_calls is not False, body.tool_choice
    if isinstance(choice, wire.ChosenFunction):
        named = ToolChoice(mode="named", name=_model_name(choice.name, body), parallel=parallel)
        return check_choice(named, tools)
    return check_choice(ToolChoice(mode=choice or "auto", parallel=parallel), tools)


def _constraint(body: wire.ResponsesRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case JsonObjectFormat(schema=schema):
            return JsonSchema(schema or {"type": "object"})
        case wire.SchemaFormat(schema=schema):
            return JsonSchema(schema)
    return None
