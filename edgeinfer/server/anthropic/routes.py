"""Anthropic's routes: what coding agents speak."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import Message, Tool
from edgeinfer.server.anthropic import translate, wire
from edgeinfer.server.anthropic.render import MessageRenderer
from edgeinfer.server.core.begin import Job
from edgeinfer.server.core.exchange import decode, exchange_of
from edgeinfer.server.core.replies import json_reply
from edgeinfer.server.core.stream import answer
from edgeinfer.server.openai.translate import stops


async def messages(request: Request) -> Response:
    exchange = exchange_of(request)
    body = await decode(request, wire.MessagesRequest)
    job = Job(
        model=body.model,
        keep_alive_s=body.keep_alive,
        stream=body.stream,
        requests=lambda info: [translate.messages_request(body, info)],
        renderer=lambda model, info: MessageRenderer(
            f"msg_{exchange.id.removeprefix('req_')}", model, stops(body.stop_sequences)
        ),
    )
    return await answer(exchange, job)


async def count_tokens(request: Request) -> Response:
    exchange = exchange_of(request)
    endpoint = exchange.endpoint
    body = await decode(request, wire.CountRequest)
    turns, tools = translate.conversation(body), translate.tools_of(body)
    exchange.model = endpoint.models.resolve(body.model)
    lease = await endpoint.models.acquire(exchange.model, body.keep_alive)
    try:
        count = await endpoint.in_thread(_count, lease.engine, turns, tools)
    finally:
        lease.release()
    return json_reply(wire.TokenCountReply(input_tokens=count))


def _count(engine: Engine, turns: tuple[Message, ...], tools: tuple[Tool, ...]) -> int:
    return len(engine.tokenize(engine.apply_template(turns, tools), parse_special=True))
