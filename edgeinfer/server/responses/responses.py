"""OpenAI's Responses API: converts requests to GenerateRequest, and the engine's events to responses.

If `store-responses` is set under [serve], later requests can continue and retrieve a response by id.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from edgeinfer.media import document_files
from edgeinfer.media.pictures import content_fields, from_base64
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, ReasoningDelta, TextDelta, TokenLogprobs, ToolCallDelta
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    JsonSchema,
    Message,
    ToolCall,
    ToolChoice,
)
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Dialect, Renderer, RouteTable, sse, sse_comment, wire_timings
from edgeinfer.server.generation_response import answer
from edgeinfer.server.openai.chat import ERRORS, error_text, make_tool, wire_logprobs
from edgeinfer.server.openai.wire import JsonObjectFormat, RefusalPart, TextFormat, TextPart
from edgeinfer.server.problems import Problem, unsupported
from edgeinfer.server.request_body import LenientDecoder
from edgeinfer.server.request_fields import common_fields, reasoning
from edgeinfer.server.response_store import ResponseStore, StoredResponse
from edgeinfer.server.responses import wire

ROUTES = RouteTable()
_OFF = "responses are not stored: send the whole conversation, or set `store-responses` under [serve]"
_NO_REFERENCES = (
    "responses are not stored: send the item itself (Vercel's AI SDK: `providerOptions.openai.store = "
    "false`, or `.chat(MODEL)`), or switch on `store-responses` under [serve]"
)


@ROUTES.post("/v1/responses", reply=wire.ResponseReply, streams=True)
async def create_response(context: RequestContext, body: wire.ResponsesRequest) -> Response:
    """Answer a conversation."""
    items = [_resolve(context, item) for item in _items(body)]
    joined = msgspec.structs.replace(body, input=[*_previous_items(context, body), *items])
    context.ignore([f"include={name}" for name in body.include or () if name != wire.LOGPROBS])
    if body.store is True and context.endpoint.responses is None:
        context.ignore(["store"])
    return await answer(context, joined, response_requests, ResponseRenderer, stream=bool(body.stream))


def _items(body: wire.ResponsesRequest) -> Sequence[wire.Item]:
    if isinstance(body.input, str):
        return [wire.MessageItem(role="user", content=body.input)]
    return body.input


def _previous_items(context: RequestContext, body: wire.ResponsesRequest) -> Sequence[wire.Item]:
    """Return the conversation of `previous_response_id`. Raises Problem 400 if it is not stored."""
    name, param = body.previous_response_id, "previous_response_id"
    if name is None:
        return ()
    store = context.endpoint.responses
    if store is None:
        raise unsupported(param, _OFF)
    previous = store.find(context.key, name)
    if previous is None:
        message = f"Previous response with id '{name}' not found."
        raise Problem(400, message, param=param, code="previous_response_not_found")
    return [*previous.conversation, *_output_items(previous)]


def _resolve(context: RequestContext, item: wire.Item) -> wire.Item:
    """Return the stored item for an `item_reference`. Raises Problem 400 if it is not stored."""
    if not isinstance(item, wire.ItemReference):
        return item
    store = context.endpoint.responses
    if store is None:
        raise unsupported("item_reference", _NO_REFERENCES)
    response = store.find(context.key, f"resp_{item.id.partition('_')[2].rpartition('_')[0]}")
    for output in _output_items(response) if response is not None else ():
        if not isinstance(output, wire.ItemReference) and output.id == item.id:
            return output
    message = f"Item with id '{item.id[:200]}' is not stored: send the item itself."
    raise Problem(400, message, param="input", code="item_not_found")


def _output_items(response: StoredResponse) -> Sequence[wire.Item]:
    output = msgspec.json.decode(response.reply)["output"]
    return _items(LenientDecoder().read({"input": output}, wire.ResponsesRequest)) if output else ()


@ROUTES.get("/v1/responses/{id}", reply=wire.ResponseReply)
async def stored_response(context: RequestContext, query: wire.StoredQuery) -> Response:
    """Return a stored response."""
    _, response = find_stored(context)
    return Response(response.reply, media_type="application/json")


@ROUTES.delete("/v1/responses/{id}")
async def delete_response(context: RequestContext) -> wire.DeletedResponse:
    """Delete a stored response."""
    store, _ = find_stored(context)
    store.remove(context.key, context.path_id)
    return wire.DeletedResponse(id=context.path_id)


def find_stored(context: RequestContext) -> tuple[ResponseStore, StoredResponse]:
    """Return the store and the response whose id is in the path. Raises Problem 404."""
    store, name = context.endpoint.responses, context.path_id
    if store is not None and (response := store.find(context.key, name)) is not None:
        return store, response
    hint = f": {_OFF}" if store is None else ""
    raise Problem(404, f"Response with id '{name[:200]}' not found{hint}.", code="not_found")


def response_requests(body: wire.ResponsesRequest, info: EngineInfo) -> list[GenerateRequest]:
    """Convert the body of POST /v1/responses to a list of one request for the engine.

    Raises InvalidRequestError for a file that cannot be decoded.
    """
    wants_logprobs = wire.LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    request = GenerateRequest(
        messages=_conversation(body),
        tools=tuple(make_tool(function, name) for name, _, function in functions_of(body)),
        tool_choice=_tool_choice(body),
        constraint=_constraint(body),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        overflow="shift" if body.truncation == "auto" else "refuse",
        **reasoning(body.reasoning.effort if body.reasoning else None, budget=body.reasoning_budget),
        **common_fields(body, info),
    )
    return [request]


def _conversation(body: wire.ResponsesRequest) -> tuple[Message, ...]:
    """Convert instructions and items to messages. Reasoning and calls become parts of messages."""
    turns: list[Message] = []
    if body.instructions:
        turns.append(Message(role="system", content=body.instructions))
    for item in _items(body):
        match item:
            case wire.MessageItem():
                thought = _pending_reasoning(turns, item)
                turns.append(Message(role=item.role, reasoning=thought, **_content(item.content)))
            case wire.FunctionOutputItem():
                turns.append(Message(role="tool", tool_call_id=item.call_id, **_content(item.output)))
            case wire.ReasoningItem():
                text = "".join(piece.text for piece in item.content or item.summary)
                turns.append(Message(role="assistant", reasoning=text))
            case wire.FunctionCallItem():
                name = _shown_name(item.namespace, item.name)
                call = ToolCall(id=item.call_id, name=name, arguments=item.arguments)
                is_reply = bool(turns) and turns[-1].role == "assistant"
                reply = turns.pop() if is_reply else Message(role="assistant")
                turns.append(msgspec.structs.replace(reply, tool_calls=(*reply.tool_calls, call)))
    return tuple(turns)


def _pending_reasoning(turns: list[Message], item: wire.MessageItem) -> str:
    """Remove and return the reasoning in `turns` before the assistant's message `item`; "" for none."""
    last = turns[-1] if turns and item.role == "assistant" else None
    if last is None or last.role != "assistant" or last.content or last.tool_calls:
        return ""
    return turns.pop().reasoning


_Part = TextPart | wire.InputImage | wire.InputFile | wire.OutputText | RefusalPart


def _content(content: str | dict[str, Any] | Sequence[_Part]) -> dict[str, Any]:
    """Return the fields `content` and `pictures` of a Message. The model sees an object as JSON."""
    if isinstance(content, dict):
        content = msgspec.json.encode(content).decode()
    pieces: list[str | bytes] = []
    for content_part in [content] if isinstance(content, str) else content:
        match content_part:
            case wire.InputImage(image_url=url):
                pieces.append(from_base64(url))
            case wire.InputFile(file_data=data, filename=name):
                pieces += document_files.parts_of(data, name)
            case str(text) | RefusalPart(refusal=text):
                pieces.append(text)
            case TextPart(text=text) | wire.OutputText(text=text):
                pieces.append(text)
    return content_fields(pieces)


def functions_of(
    body: wire.ResponsesRequest,
) -> Iterator[tuple[str, str | None, wire.ResponseFunctionTool]]:
    """Yield (name that the model sees, namespace, function) for each function tool of a request.

    The namespace is the name of the `NamespaceTool` that contains the function; None if there is none.
    """
    for tool in body.tools or ():
        if isinstance(tool, wire.NamespaceTool):
            yield from ((_shown_name(tool.name, f.name), tool.name, f) for f in tool.tools)
        else:
            yield tool.name, None, tool


def _shown_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function: `name`, or `namespace.name`."""
    return f"{namespace}.{name}" if namespace else name


def _tool_choice(body: wire.ResponsesRequest) -> ToolChoice:
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, wire.ChosenFunction):
        return ToolChoice(mode="named", name=_model_name(choice.name, body), parallel=parallel)
    return ToolChoice(mode=choice or "auto", parallel=parallel)


def _model_name(name: str, body: wire.ResponsesRequest) -> str:
    """Return the name under which the model sees the function that a client calls `name`.

    `tool_choice` has no namespace: "search" stands for "web.search" if there is such a function.
    """
    shown_names = [shown for shown, _, f in functions_of(body) if name in (shown, f.name)]
    return name if name in shown_names else next(iter(shown_names), name)


def _constraint(body: wire.ResponsesRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case JsonObjectFormat(schema=schema):
            return JsonSchema(schema or {"type": "object"})
        case wire.SchemaFormat(schema=schema):
            return JsonSchema(schema)
    return None


_encode = msgspec.json.Encoder().encode
#: Type of an output item → prefix of its id, as in `msg_…`, and its content part before it has text
#: (None: items of this type have no parts).
_ITEMS: dict[str, tuple[str, Any]] = {
    "message": ("msg", wire.OutputTextOut(text="")),
    "reasoning": ("rs", wire.ReasoningTextOut(text="")),
    "function_call": ("fc", None),
}


class ResponseRenderer(Renderer):
    """Renders POST /v1/responses, and stores the finished response for later requests.

    The response is not stored if the client sent `store: false`, or if the endpoint has no store. In a
    stream, events announce each item and part, send the text in pieces, and repeat the whole text.
    `sequence_number` counts the events.
    """

    def __init__(self, context: RequestContext, body: wire.ResponsesRequest, info: EngineInfo) -> None:
        self._store = context.endpoint.responses if body.store in (None, True) else None
        self._key = context.key
        unique = context.plain_id if self._store is None else secrets.token_hex(24)
        self._id = f"resp_{unique}"
        self._model = context.model
        self._created = int(time.time())
        self._request = body
        self._names = {name: (space, tool.name) for name, space, tool in functions_of(body)}
        self._answer = CollectedAnswer()
        self._sequence = -1
        self._items: list[tuple[str, int, CollectedAnswer]] = []

    def opening(self) -> bytes:
        reply = self._reply("in_progress")
        created = self._sse("response.created", response=reply)
        return created + self._sse("response.in_progress", response=reply)

    def event(self, index: int, event: Event) -> bytes:
        self._answer.add(event)
        match event:
            case TextDelta(text=text):
                out, logprobs = self._switch_item("message", 0, event), _logprobs(event.logprobs)
                return out + self._part("response.output_text.delta", delta=text, logprobs=logprobs)
            case ReasoningDelta(text=text):
                out = self._switch_item("reasoning", 0, event)
                return out + self._part("response.reasoning_text.delta", delta=text)
            case ToolCallDelta(arguments=json):
                out = self._switch_item("function_call", event.index, event)
                kind = "response.function_call_arguments.delta"
                return out + (self._of_item(kind, delta=json) if json else b"")
        return b""

    def closing(self) -> bytes:
        reply = self._finished_reply(self._answer)
        done = self._finish_item("incomplete" if self._answer.finish.is_cut_short else "completed")
        return done + self._sse(f"response.{reply.status}", response=reply)

    def failure(self, problem: Problem) -> bytes:
        error = wire.ResponseError(code=problem.code or "server_error", message=error_text(problem))
        return self._sse("response.failed", response=self._reply("failed", error=error))

    def waiting(self, text: str) -> bytes:
        in_progress = self._reply("in_progress")
        return sse_comment(text) + self._sse("response.in_progress", response=in_progress)

    def _sse(self, event_type: str, /, **data: Any) -> bytes:
        self._sequence += 1
        return sse({"type": event_type, "sequence_number": self._sequence, **data}, event_type)

    def _of_item(self, event_type: str, /, **data: Any) -> bytes:
        """Encode an event about the last item of the output."""
        index = len(self._items) - 1
        return self._sse(event_type, item_id=self._item_id(index), output_index=index, **data)

    def _part(self, event_type: str, /, **data: Any) -> bytes:
        """Encode an event about the only content part of the last item."""
        return self._of_item(event_type, content_index=0, **data)

    def _switch_item(self, kind: str, number: int, event: Event) -> bytes:
        """Add an event to the last item, or to a new one of another kind; encode what announces it."""
        out = b""
        if not self._items or self._items[-1][:2] != (kind, number):
            out = self._finish_item()
            self._items.append((kind, number, CollectedAnswer()))
            index = len(self._items) - 1
            item = self._item(index, "in_progress", empty=True)
            out += self._sse("response.output_item.added", output_index=index, item=item)
            _, empty_part = _ITEMS[kind]
            out += self._part("response.content_part.added", part=empty_part) if empty_part else b""
        self._items[-1][2].add(event)
        return out

    def _finish_item(self, status: wire.ItemStatus = "completed") -> bytes:
        if not self._items:
            return b""
        index = len(self._items) - 1
        item = self._item(index, status)
        if isinstance(item, wire.FunctionCallOut):
            kind = "response.function_call_arguments.done"
            namespace = {"namespace": item.namespace} if item.namespace else {}
            out = self._of_item(kind, name=item.name, arguments=item.arguments, **namespace)
        else:
            (content,) = item.content
            if isinstance(content, wire.OutputTextOut):
                text, logprobs = content.text, content.logprobs
                out = self._part("response.output_text.done", text=text, logprobs=logprobs)
            else:
                out = self._part("response.reasoning_text.done", text=content.text)
            out += self._part("response.content_part.done", part=content)
        return out + self._sse("response.output_item.done", output_index=index, item=item)

    def _item_id(self, index: int) -> str:
        kind, _, _ = self._items[index]
        prefix, _ = _ITEMS[kind]
        return f"{prefix}_{self._id.removeprefix('resp_')}_{index}"

    def _item(self, index: int, status: wire.ItemStatus, *, empty: bool = False) -> wire.OutputItem:
        kind, number, answer = self._items[index]
        item_id = self._item_id(index)
        if kind == "message":
            text = wire.OutputTextOut(text=answer.text, logprobs=_logprobs(answer.logprobs))
            return wire.MessageOut(id=item_id, content=[] if empty else [text], status=status)
        if kind == "reasoning":
            thought = wire.ReasoningTextOut(text=answer.reasoning)
            return wire.ReasoningOut(id=item_id, content=[] if empty else [thought], status=status)
        call = self._answer.calls[number]
        namespace, name = self._names.get(call.name, (None, call.name))
        return wire.FunctionCallOut(
            id=item_id,
            call_id=call.id,
            name=name,
            arguments="" if empty else call.arguments,
            status=status,
            namespace=namespace or msgspec.UNSET,
        )

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        if answer.reasoning:
            self._items.append(("reasoning", 0, answer))
        if answer.text or not answer.calls:
            self._items.append(("message", 0, answer))
        self._items += [("function_call", number, answer) for number in sorted(answer.calls)]
        self._answer = answer
        return _encode(self._finished_reply(answer))

    def _finished_reply(self, answer: CollectedAnswer) -> wire.ResponseReply:
        """Make the response object of a finished answer, and store it."""
        finished, usage = answer.finish, answer.finish.usage
        output = [self._item(index, "completed") for index in range(len(self._items))]
        cause = wire.IncompleteDetails(reason="max_output_tokens") if finished.is_cut_short else None
        if cause and output:
            output[-1] = msgspec.structs.replace(output[-1], status="incomplete")
        reply = self._reply(
            "incomplete" if cause else "completed",
            output=output,
            usage=wire.ResponseUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.prompt_tokens + usage.completion_tokens,
                input_tokens_details=wire.InputDetails(
                    cached_tokens=usage.cached_tokens, cached_disk_tokens=usage.cached_disk_tokens
                ),
                output_tokens_details=wire.OutputDetails(reasoning_tokens=usage.reasoning_tokens),
            ),
            incomplete_details=cause,
            timings=wire_timings(usage, finished.timings),
        )
        if self._store is not None and finished.reason != "cancelled":
            encoded, conversation = _encode(reply), tuple(_items(self._request))
            size_bytes = len(encoded) + len(_encode(conversation))
            stored = StoredResponse(encoded, conversation, size_bytes)
            self._store.add(self._key, self._id, stored)
        return reply

    def _reply(self, status: wire.ResponseStatus, **finished: Any) -> wire.ResponseReply:
        """Make the response object; `finished` are fields that only a finished answer has."""
        body = self._request
        text = (body.text and body.text.format) or TextFormat()
        return wire.ResponseReply(
            id=self._id,
            created_at=self._created,
            model=self._model,
            status=status,
            tools=msgspec.to_builtins(body.tools or []),
            tool_choice=msgspec.to_builtins(body.tool_choice or "auto"),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": msgspec.to_builtins(text)},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            truncation=body.truncation or "disabled",
            previous_response_id=body.previous_response_id,
            store=self._store is not None,
            reasoning=msgspec.to_builtins(body.reasoning) if body.reasoning else None,
            **finished,
        )


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return msgspec.to_builtins(wire_logprobs(tokens).content) if tokens else []


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode an error as the event `error`, for streams that end before a renderer exists."""
    event = {
        "type": "error",
        "code": problem.code,
        "message": error_text(problem),
        "param": problem.param,
        "sequence_number": 0,
    }
    return sse(event, "error")


RESPONSES = Dialect(name="responses", operations=ROUTES, **ERRORS | {"error_events": error_events})
