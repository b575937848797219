"""OpenAI's Responses route."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.server.core.begin import Job
from edgeinfer.server.core.bodies import decode
from edgeinfer.server.core.exchange import exchange_of
from edgeinfer.server.core.stream import answer
from edgeinfer.server.responses import translate
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import ResponsesRequest


async def responses(request: Request) -> Response:
    exchange = exchange_of(request)
    body = await decode(request, ResponsesRequest)
    job = Job(
        model=body.model,
        keep_alive_s=body.keep_alive,
        stream=bool(body.stream),
        requests=lambda info: [translate.response_request(body, info)],
        renderer=lambda model, info: ResponseRenderer(f"resp_{exchange.plain_id}", model, body),
    )
    return await answer(exchange, job)
