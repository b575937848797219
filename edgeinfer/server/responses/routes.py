"""OpenAI's Responses routes."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.server.answer_journal import BodyFilter, JournaledAnswer
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Dialect, RouteTable, sse
from edgeinfer.server.generation import answer
from edgeinfer.server.openai.render import error_body, sentence
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem
from edgeinfer.server.responses import stored, translate
from edgeinfer.server.responses.mcp import mcp_calls
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import (
    DeletedResponse,
    ResponseReply,
    ResponsesRequest,
    StoredQuery,
)

ROUTES = RouteTable()


@ROUTES.post("/v1/responses", reply=ResponseReply, streams=True, may_store=True)
async def responses(context: RequestContext, body: ResponsesRequest) -> Response:
    """Answer a conversation."""
    whole = stored.with_previous(context, body)
    mcp = await mcp_calls(context, whole)
    name = stored.journal_answer(context, whole)
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
    _, found = stored.find(context, context.path_id)
    if not query.stream:
        return Response(stored.reply_of(found), media_type="application/json")
    if not found.is_stream:
        raise Problem(400, "This response is not a stream.", param="stream", code="invalid_value")
    read = -1 if query.starting_after is None else query.starting_after
    return _ReplayResponse(found, stored.skip_events(read))


@ROUTES.delete("/v1/responses/{id}")
async def delete_response(context: RequestContext) -> DeletedResponse:
    """Forget a stored response, and end it if it is being made."""
    journal, found = stored.find(context, context.path_id)
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
