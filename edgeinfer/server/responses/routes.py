"""OpenAI's Responses route."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.runtime.interface import Engine
from edgeinfer.server.core.begin import Job
from edgeinfer.server.core.bodies import decode
from edgeinfer.server.core.exchange import exchange_of, with_engine
from edgeinfer.server.core.replies import json_reply
from edgeinfer.server.core.stream import answer
from edgeinfer.server.responses import translate
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import InputTokensReply, ResponsesRequest


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


async def input_tokens(request: Request) -> Response:
    exchange = exchange_of(request)
    body = await decode(request, ResponsesRequest)
    turns, tools = exchange.settle(translate.conversation(body)), translate.tools_of(body)

    def work(engine: Engine) -> InputTokensReply:
        prompt = engine.apply_template(turns, tools)
        return InputTokensReply(input_tokens=len(engine.tokenize(prompt, parse_special=True)))

    return json_reply(await with_engine(exchange, body.model, body.keep_alive, work))
