"""OpenAI's Responses routes."""

from __future__ import annotations

from starlette.responses import Response

from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Dialect, RouteTable, sse
from edgeinfer.server.generation import answer
from edgeinfer.server.openai.render import error_body, sentence
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem
from edgeinfer.server.responses import translate
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import ResponseReply, ResponsesRequest

ROUTES = RouteTable()


@ROUTES.post("/v1/responses", reply=ResponseReply, streams=True)
async def responses(context: RequestContext, body: ResponsesRequest) -> Response:
    """Answer a conversation."""
    return await answer(
        context,
        body,
        lambda info: [translate.response_request(body, info)],
        lambda model, info: ResponseRenderer(f"resp_{context.plain_id}", model, body),
        stream=bool(body.stream),
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
