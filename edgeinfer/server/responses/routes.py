"""OpenAI's Responses routes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.runtime.interface import Engine
from edgeinfer.server.answer_journal import Cut, Kept
from edgeinfer.server.context import exchange_of, json_reply, with_engine
from edgeinfer.server.generation import Job, answer
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import decode, decode_query
from edgeinfer.server.responses import stored, translate
from edgeinfer.server.responses.render import ResponseRenderer
from edgeinfer.server.responses.wire import (
    DeletedResponse,
    InputItemsQuery,
    InputTokensReply,
    ResponsesRequest,
    StoredQuery,
)


async def responses(request: Request) -> Response:
    exchange = exchange_of(request)
    body = stored.go_on(exchange, await decode(request, ResponsesRequest))
    name = stored.store(exchange, body)
    is_stored = exchange.kept is not None and exchange.kept.about is not None
    job = Job(
        model=body.model,
        keep_alive=body.keep_alive,
        stream=bool(body.stream),
        requests=lambda info: [translate.response_request(body, info)],
        renderer=lambda model, info: ResponseRenderer(name, model, body, stored=is_stored),
    )
    return await answer(exchange, job)


async def cancel_response(request: Request) -> Response:
    exchange = exchange_of(request)
    _, kept = stored.find(exchange, request.path_params["id"])
    return Response(stored.cancel(kept), media_type="application/json")


async def input_items(request: Request) -> Response:
    query = decode_query(request, InputItemsQuery)
    name = request.path_params["id"]
    _, kept = stored.find(exchange_of(request), name)
    return json_reply(stored.input_items(kept, name, query))


async def input_tokens(request: Request) -> Response:
    exchange = exchange_of(request)
    body = stored.go_on(exchange, await decode(request, ResponsesRequest))
    turns, tools = exchange.settle(translate.conversation(body)), translate.tools_of(body)

    def work(engine: Engine) -> InputTokensReply:
        return InputTokensReply(input_tokens=len(engine.tokenize_chat(turns, tools)))

    return json_reply(await with_engine(exchange, body.model, body.keep_alive, work))


async def stored_response(request: Request) -> Response:
    query = decode_query(request, StoredQuery)
    _, kept = stored.find(exchange_of(request), request.path_params["id"])
    if query.stream:
        if not kept.is_stream:
            raise Problem(400, "This response is not a stream.", param="stream", code="invalid_value")
        return _Again(kept, stored.after(-1 if query.starting_after is None else query.starting_after))
    return Response(stored.reply_of(kept), media_type="application/json")


async def delete_response(request: Request) -> Response:
    exchange, name = exchange_of(request), request.path_params["id"]
    answers, kept = stored.find(exchange, name)
    answers.remove(exchange.key, name)
    kept.give_up()
    return json_reply(DeletedResponse(id=name))


class _Again(Response):
    def __init__(self, kept: Kept, cut: Cut) -> None:
        super().__init__()
        self._kept = kept
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._kept.read(receive, send, self._cut)
