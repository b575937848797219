"""OpenAI's Responses routes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.server.answer_journal import BodyFilter, JournaledAnswer
from edgeinfer.server.context import context_of, json_reply
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import answer
from edgeinfer.server.openai.render import error_body, sentence
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import decode, decode_query
from edgeinfer.server.responses import stored, translate
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import (
    DeletedResponse,
    ResponseReply,
    ResponsesRequest,
    StoredQuery,
)

ROUTES = RouteTable()


@ROUTES.post("/v1/responses", body=ResponsesRequest, reply=ResponseReply, streams=True, may_store=True)
async def responses(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = stored.with_previous(context, await decode(request, ResponsesRequest))
    name = stored.journal_answer(context, body)
    is_stored = context.journaled is not None and context.journaled.attachment is not None
    return await answer(
        context,
        body,
        lambda info: [translate.response_request(body, info)],
        lambda model, info: ResponseRenderer(name, model, body, stored=is_stored),
        stream=bool(body.stream),
    )


@ROUTES.get("/v1/responses/{id}", query=StoredQuery, reply=ResponseReply, streams=True)
async def stored_response(request: Request) -> Response:
    """A stored response, or its stream from behind an event."""
    query = decode_query(request, StoredQuery)
    _, answer_ = stored.find(context_of(request), request.path_params["id"])
    if query.stream:
        if not answer_.is_stream:
            raise Problem(400, "This response is not a stream.", param="stream", code="invalid_value")
        return _ReplayResponse(
            answer_, stored.skip_events(-1 if query.starting_after is None else query.starting_after)
        )
    return Response(stored.reply_of(answer_), media_type="application/json")


@ROUTES.delete("/v1/responses/{id}", reply=DeletedResponse)
async def delete_response(request: Request) -> Response:
    """Forget a stored response, and end it if it is being made."""
    context, name = context_of(request), request.path_params["id"]
    answers, answer_ = stored.find(context, name)
    answers.remove(context.key, name)
    answer_.abandon()
    return json_reply(DeletedResponse(id=name))


class _ReplayResponse(Response):
    def __init__(self, answer_: JournaledAnswer, cut: BodyFilter) -> None:
        super().__init__()
        self._answer = answer_
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.read(receive, send, self._cut)


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode the `error` event, sent if `response.failed` cannot be."""
    event = {
        "type": "error",
        "code": problem.code,
        "message": sentence(problem),
        "param": problem.param,
        "sequence_number": 0,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


RESPONSES = Dialect(
    name="responses",
    error_type=ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
