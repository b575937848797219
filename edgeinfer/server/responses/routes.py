"""OpenAI's Responses, continued by id, retrieved, and streamed again from any event.

The answer journal holds stored ones, in memory, per API key, bounded by `Limits`; with each lies the
conversation before it.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.server.answer_journal import AnswerJournal, BodyFilter, JournaledAnswer
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Dialect, RouteTable, sse
from edgeinfer.server.generation import answer
from edgeinfer.server.openai.render import error_body, sentence
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem, unsupported
from edgeinfer.server.request_body import LenientDecoder
from edgeinfer.server.responses import translate, wire
from edgeinfer.server.responses.mcp import mcp_calls
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import (
    DeletedResponse,
    ResponseReply,
    ResponsesRequest,
    StoredQuery,
)

ROUTES = RouteTable()
_OFF = "responses are not stored, send the conversation; `store-responses` under [serve] switches it on"
_NO_REFERENCES = (
    "responses are not stored: send the item itself (Vercel's AI SDK: `providerOptions.openai.store = "
    "false`, or `.chat(MODEL)`), or switch on `store-responses` under [serve]"
)
_SEQUENCE = re.compile(rb'^data: \{"type":"[\w.]+","sequence_number":(\d+)', re.MULTILINE)


@ROUTES.post("/v1/responses", reply=ResponseReply, streams=True, may_store=True)
async def responses(context: RequestContext, body: ResponsesRequest) -> Response:
    """Answer a conversation."""
    whole = with_previous(context, with_references(context, body))
    mcp = await mcp_calls(context, whole)
    name = journal_answer(context, whole)
    if mcp is not None:
        whole = await mcp.answered(whole)
    is_stored = context.journaled is not None and context.journaled.attachment is not None
    return await answer(
        context,
        whole,
        lambda info: [translate.response_request(whole, info, mcp.offered.values() if mcp else ())],
        lambda model, info: ResponseRenderer(
            name, model, whole, stored=is_stored, events=mcp.events if mcp else None
        ),
        stream=bool(body.stream),
        wrap=mcp.between if mcp else None,
    )


@ROUTES.get("/v1/responses/{id}", reply=ResponseReply, streams=True)
async def stored_response(context: RequestContext, query: StoredQuery) -> Response:
    """A stored response, or its stream from behind an event."""
    _, found = find_stored(context, context.path_id)
    if not query.stream:
        return Response(reply_of(found), media_type="application/json")
    if not found.is_stream:
        raise Problem(400, "This response is not a stream.", param="stream", code="invalid_value")
    read = -1 if query.starting_after is None else query.starting_after
    return _ReplayResponse(found, skip_events(read))


@ROUTES.delete("/v1/responses/{id}")
async def delete_response(context: RequestContext) -> DeletedResponse:
    """Forget a stored response, and end it if it is being made."""
    journal, found = find_stored(context, context.path_id)
    journal.remove(context.key, context.path_id)
    found.abandon()
    return DeletedResponse(id=context.path_id)


class _ReplayResponse(Response):
    def __init__(self, answer_: JournaledAnswer, cut: BodyFilter) -> None:
        super().__init__()
        self._answer = answer_
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.read(receive, send, self._cut)


class StoredResponse(msgspec.Struct):
    """The conversation before an answer, and the response object while it is generated."""

    items: tuple[wire.Item, ...]
    in_progress: wire.ResponseReply


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


def with_previous(context: RequestContext, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Prepend the conversation of `previous_response_id`.

    Raises Problem 400 if that response is not stored, 409 while it is generated.
    """
    name, param = body.previous_response_id, "previous_response_id"
    if name is None:
        return body
    journal = context.endpoint.journal
    if journal is None:
        raise unsupported(param, _OFF)
    answer = journal.find(context.key, name)
    if answer is None:
        message = f"Previous response with id '{name}' not found."
        raise Problem(400, message, param=param, code="previous_response_not_found")
    if not answer.is_done:
        message = f"Previous response with id '{name}' is still being made."
        raise Problem(409, message, param=param, code="previous_response_in_progress")
    stored = _stored(answer)
    return msgspec.structs.replace(
        body, input=[*stored.items, *_output_items(answer), *_own_items(body)]
    )


def with_references(context: RequestContext, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Replace references by the items of stored responses. Raises Problem 400 for another one."""
    if isinstance(body.input, str):
        return body
    items = [_referred(context, item) for item in body.input]
    return msgspec.structs.replace(body, input=items)


def _referred(context: RequestContext, item: wire.Item) -> wire.Item:
    if not isinstance(item, wire.ItemReference):
        return item
    journal = context.endpoint.journal
    if journal is None:
        raise unsupported("item_reference", _NO_REFERENCES)
    answer = journal.find(context.key, f"resp_{item.id.partition('_')[2].rpartition('_')[0]}")
    outputs = _output_items(answer) if answer is not None and answer.is_done else []
    for output in outputs:
        if not isinstance(output, wire.ItemReference) and output.id == item.id:
            return output
    message = f"Item with id '{item.id[:200]}' is not stored: send the item itself."
    raise Problem(400, message, param="input", code="item_not_found")


def journal_answer(context: RequestContext, body: wire.ResponsesRequest) -> str:
    """Store the answer under a new id if the request and the configuration allow; return its id.

    Raises UnknownModelError.
    """
    answer, journal = context.journaled, context.endpoint.journal
    if body.store is True and journal is None:
        context.ignore(["store"])
    if answer is None or journal is None or body.store not in (None, True):
        return f"resp_{context.plain_id}"
    name = f"resp_{secrets.token_hex(24)}"
    items = tuple(_own_items(body))
    model = context.endpoint.models.resolve(body.model)
    in_progress = ResponseRenderer(name, model, body, stored=True).reply("in_progress")
    answer.attachment = StoredResponse(items, in_progress)
    answer.size_bytes += len(msgspec.json.encode(items))
    answer.unread_s = max(answer.unread_s, context.endpoint.limits.unread_s)
    journal.add(context.key, name, answer)
    return name


def find_stored(context: RequestContext, name: str) -> tuple[AnswerJournal, JournaledAnswer]:
    """Find a stored response by id. Raises Problem 404."""
    journal = context.endpoint.journal
    answer = journal.find(context.key, name) if journal is not None else None
    if journal is None or answer is None:
        message = f"Response with id '{name[:200]}' not found."
        raise Problem(
            404, message if journal is not None else f"{message[:-1]}: {_OFF}.", code="not_found"
        )
    return journal, answer


def reply_of(answer: JournaledAnswer) -> bytes:
    """Return the response object, in progress or complete, as JSON."""
    if not answer.is_done:
        return msgspec.json.encode(_stored(answer).in_progress)
    if not answer.is_stream:
        return answer.body
    last = answer.body.rpartition(b"\ndata: ")[2]  # `response.completed`, or `response.incomplete`
    return bytes(msgspec.json.decode(last, type=_LastEvent).response)


def skip_events(sequence: int) -> BodyFilter:
    """Make a filter that drops events up to this number; a message holds whole events."""

    def drop(body: bytes) -> bytes:
        events = [event for event in body.split(b"\n\n") if event]
        return b"".join(event + b"\n\n" for event in events if _number(event) > sequence)

    return drop


def _number(event: bytes) -> int:
    found = _SEQUENCE.search(event)
    return int(found[1]) if found else -1


def _stored(answer: JournaledAnswer) -> StoredResponse:
    assert isinstance(answer.attachment, StoredResponse)
    return answer.attachment


def _own_items(body: wire.ResponsesRequest) -> list[wire.Item]:
    if isinstance(body.input, str):
        return [wire.MessageItem(role="user", content=body.input)]
    return body.input


def _output_items(answer: JournaledAnswer) -> list[wire.Item]:
    output = msgspec.json.decode(reply_of(answer), type=_Output).output
    if not output:
        return []
    return _own_items(
        LenientDecoder(refuse_unknown=False).read({"input": output}, wire.ResponsesRequest)
    )


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode the `error` event, sent if `response.failed` cannot be."""
    event = {
        "type": "error",
        "code": problem.code,
        "message": sentence(problem),
        "param": problem.param,
        "sequence_number": 0,
    }
    return sse(event, "error")


RESPONSES = Dialect(
    name="responses",
    error_type=ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
