"""Anthropic's Messages API: converts requests to GenerateRequest, and events to Anthropic's answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from edgeinfer.media import document_files
from edgeinfer.media.pictures import content_fields, from_base64
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall
from edgeinfer.runtime.events import (
    Event,
    Finished,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Message, Tool, ToolCall, ToolChoice
from edgeinfer.server.anthropic import wire
from edgeinfer.server.context import RequestContext, engine_call
from edgeinfer.server.dialect import Dialect, Renderer, RouteTable, sse, sse_comment, wire_timings
from edgeinfer.server.generation_response import answer
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import common_fields, reasoning

ROUTES = RouteTable()


@ROUTES.post("/v1/messages", reply=wire.MessageReply, streams=True)
async def messages(context: RequestContext, body: wire.MessagesRequest) -> Response:
    """Answer a conversation."""
    return await answer(context, body, message_requests, MessageRenderer, stream=body.stream)


@ROUTES.post("/v1/messages/count_tokens")
@engine_call
def count_tokens(
    context: RequestContext, body: wire.CountRequest, engine: Engine
) -> wire.TokenCountReply:
    """Count a conversation's tokens."""
    fields = _prompt_fields(body)
    turns = context.normalize(fields.pop("messages"))
    conversation = GenerateRequest(messages=turns, **fields)
    return wire.TokenCountReply(input_tokens=len(engine.tokenize_chat(conversation)))


def message_requests(body: wire.MessagesRequest, info: EngineInfo) -> list[GenerateRequest]:
    """Convert the body of POST /v1/messages to a list of one request for the engine.

    If the last turn is the assistant's, the model continues that turn. Raises InvalidRequestError for a
    file that cannot be decoded.
    """
    output_format = body.output_config.format if body.output_config else None
    request = GenerateRequest(
        constraint=None if output_format is None else JsonSchema(output_format.schema),
        max_tokens=body.max_tokens,
        **_prompt_fields(body),
        **common_fields(body, info) | {"stop": tuple(body.stop_sequences or ())},
    )
    return [request]


def _prompt_fields(body: wire.CountRequest) -> dict[str, Any]:
    """Return the fields of GenerateRequest from which the engine makes the prompt."""
    return {
        "messages": _conversation(body),
        "tools": _tools(body),
        "tool_choice": _tool_choice(body),
        "continue_final": isinstance(body.messages[-1], wire.AssistantTurn),
        **_thinking(body),
    }


def _conversation(body: wire.CountRequest) -> tuple[Message, ...]:
    """Convert the conversation to messages; tool results become messages before their user turn."""
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


def _user(turn: wire.UserTurn) -> list[Message]:
    if isinstance(turn.content, str):
        return [Message(role="user", content=turn.content)]
    turns: list[Message] = []
    blocks: list[_Texts | wire.ImageBlock] = []
    for block in turn.content:
        if isinstance(block, wire.ToolResultBlock):
            fields = _content(block.content or "")
            if block.is_error:
                fields["content"] = f"Error: {fields['content']}"
            turns.append(Message(role="tool", tool_call_id=block.tool_use_id, **fields))
        else:
            blocks.append(block)
    return [*turns, Message(role="user", **_content(blocks))] if blocks or not turns else turns


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
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
    return Message(role="assistant", content=text, reasoning=thought, tool_calls=tuple(calls))


_Texts = wire.TextBlock | wire.DocumentBlock | wire.ToolReferenceBlock


def _content(content: str | Sequence[_Texts | wire.ImageBlock]) -> dict[str, Any]:
    """Return the fields `content` and `pictures` of a Message."""
    if isinstance(content, str):
        return {"content": content}
    pieces: list[str | bytes] = []
    for block in content:
        match block:
            case wire.ImageBlock(source=source):
                pieces.append(from_base64(source.data))
            case wire.DocumentBlock(source=wire.FileSource(data=data), title=title, context=context):
                pieces += filter(None, [context])
                pieces += document_files.parts_of(data, title or "document")
            case _:
                pieces.append(_text(block))
    return content_fields(pieces, between="\n")


def _text(block: _Texts) -> str:
    match block:
        case wire.TextBlock(text=text):
            return text
        case wire.ToolReferenceBlock(tool_name=name):
            return f"The tool {name} is there now."
        case wire.DocumentBlock(source=source):
            content = source.content if isinstance(source, wire.BlocksSource) else source.data
            return "\n".join(filter(None, [block.title, block.context, _join_texts(content)]))


def _join_texts(content: str | Sequence[_Texts]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text, content))


#: Matches the name of a client's tool with which the model can search for tools that the client sends
#: with `defer_loading`, e.g. `tool_search`.
_SEARCH = re.compile(r"tool.?search|(search|find).?tool", re.IGNORECASE)


def _tools(body: wire.CountRequest) -> tuple[Tool, ...]:
    """Return the tools that the model sees.

    If one of the client's tools searches for tools, tools with `defer_loading` are left out until a
    tool result refers to them. Otherwise the model sees all: Anthropic's server-side search is missing.
    """
    referred = _referenced_names(body)
    searches = any(_SEARCH.search(tool.name) for tool in body.tools or () if not tool.defer_loading)
    return tuple(
        Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.input_schema,
            strict=tool.strict is True,
        )
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


_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageRenderer(Renderer):
    """Renders POST /v1/messages.

    A stream is a sequence of content blocks (text, thinking, tool use). Only one block is open at a
    time. The stream begins with the first progress event, because its `message_start` contains the
    prompt's length. Only a stop string of the request gives the `stop_reason` "stop_sequence"; one of
    the model gives "end_turn".
    """

    def __init__(self, context: RequestContext, body: wire.MessagesRequest, info: EngineInfo) -> None:
        self._id = f"msg_{context.plain_id}"
        self._model = context.model
        self._stops = body.stop_sequences or ()
        self._started = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._block = -1
        self._open: tuple[str, int] | None = None
        self._finished: Finished | None = None

    def event(self, index: int, event: Event) -> bytes:
        block: dict[str, Any]
        match event:
            case Progress():
                self._prompt_tokens = event.total_tokens
                if event.queued or self._started:
                    return b""
                # the tokens that are done at the first progress event came from the prefix cache. If
                # all are done, some may have been prefilled before the event: report no cached tokens
                is_done = event.done_tokens == event.total_tokens
                self._cached_tokens = 0 if is_done else event.done_tokens
                return self._start()
            case TextDelta(text=text):
                block = {"type": "text", "text": ""}
                return self._delta(0, block, {"type": "text_delta", "text": text})
            case ReasoningDelta(text=text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._delta(0, block, {"type": "thinking_delta", "thinking": text})
            case ToolCallDelta(index=number, arguments=json):
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json} if json else None
                return self._delta(number, block, delta)
            case Finished():
                self._finished = event
                self._prompt_tokens = self._prompt_tokens or event.usage.prompt_tokens
        return self._start()

    def closing(self) -> bytes:
        finished = self._finished
        assert finished is not None
        reason, sequence = self._stop(finished)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage, timings = finished.usage, wire_timings(finished.usage, finished.timings)
        done = _event("message_delta", delta=delta, usage=wire_usage(usage), timings=timings)
        return self._close() + done + _event("message_stop")

    def waiting(self, text: str) -> bytes:
        return sse_comment(text) + (self._start() or _PING)

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        usage = wire.AnthropicUsage(
            input_tokens=self._prompt_tokens - self._cached_tokens,
            output_tokens=0,
            cache_read_input_tokens=self._cached_tokens,
        )
        message = wire.MessageReply(id=self._id, model=self._model, content=[], usage=usage)
        return _event("message_start", message=message) + _PING

    def _delta(self, number: int, block: dict[str, Any], delta: dict[str, Any] | None) -> bytes:
        """Encode a delta of a content block, after the events that begin the block if it is new."""
        out = self._start()
        if self._open != (block["type"], number):
            out += self._close()
            self._block += 1
            self._open = (block["type"], number)
            out += _event("content_block_start", index=self._block, content_block=block)
        return out + _event("content_block_delta", index=self._block, delta=delta) if delta else out

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._block)

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        content: list[wire.TextOut | wire.ThinkingOut | wire.ToolUseOut] = []
        if answer.reasoning:
            content.append(wire.ThinkingOut(thinking=answer.reasoning))
        if answer.text or not answer.calls:
            content.append(wire.TextOut(text=answer.text))
        content += [
            wire.ToolUseOut(id=call.id, name=call.name, input=_arguments(call))
            for _, call in sorted(answer.calls.items())
        ]
        finished = answer.finish
        reason, sequence = self._stop(finished)
        reply = wire.MessageReply(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=wire_usage(finished.usage),
            timings=wire_timings(finished.usage, finished.timings),
        )
        return _encode(reply)

    def _stop(self, finished: Finished) -> tuple[wire.StopReason, str | None]:
        if finished.reason == "tool_calls":
            return "tool_use", None
        if finished.is_cut_short:
            return "max_tokens", None
        if finished.stop_sequence in self._stops:
            return "stop_sequence", finished.stop_sequence
        return "end_turn", None


def _event(name: str, **data: Any) -> bytes:
    return sse({"type": name, **data}, name)


def _arguments(call: CollectedCall) -> dict[str, Any]:
    """Decode a tool call's arguments; return {} if the answer was cut off in the middle of them."""
    try:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def wire_usage(usage: Usage) -> wire.AnthropicUsage:
    """Convert token counts. Anthropic's `input_tokens` do not include cached tokens."""
    return wire.AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_read_disk_input_tokens=usage.cached_disk_tokens,
    )


#: Status → Anthropic's error type; other 4xx: `invalid_request_error`, other 5xx: `api_error`. Source:
#: Anthropic's API reference, "Errors".
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    message = problem.message
    if problem.lengths is not None:  # coding agents search for this text
        n_tokens, n_ctx = problem.lengths
        message = f"prompt is too long: {n_tokens} tokens > {n_ctx} maximum; {message}"
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error = wire.AnthropicErrorBody(
        type=_TYPES.get(problem.status, other), message=message, details=_details(problem)
    )
    return _encode(wire.AnthropicError(error=error, request_id=request_id))


def _details(problem: Problem) -> dict[str, Any] | msgspec.UnsetType:
    """Return `details` that make Anthropic's client repeat a request without the field `thread`."""
    if problem.code != "unsupported_parameter" or problem.param != "thread":
        return msgspec.UNSET
    return {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode an error as the event `error`, the last one of a stream."""
    return b"event: error\ndata: " + error_body(problem, request_id) + b"\n\n"


ANTHROPIC = Dialect(
    name="anthropic",
    error_type=wire.AnthropicError,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
