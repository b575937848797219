"""Routes of OpenAI's Responses API.

If `store-responses` is set under [serve], later requests can continue and retrieve a response by id.
"""

from __future__ import annotations

import functools
import secrets

import msgspec
from starlette.responses import Response

from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Dialect, RouteTable, sse
from edgeinfer.server.generation_response import answer
from edgeinfer.server.openai.render import ERRORS, error_text
from edgeinfer.server.problems import Problem, unsupported
from edgeinfer.server.request_body import LenientDecoder
from edgeinfer.server.response_store import ResponseStore, StoredResponse
from edgeinfer.server.responses import translate, wire
from edgeinfer.server.responses.render import ResponseRenderer

ROUTES = RouteTable()
_OFF = "responses are not stored: send the whole conversation, or set `store-responses` under [serve]"
_NO_REFERENCES = (
    "responses are not stored: send the item itself (Vercel's AI SDK: `providerOptions.openai.store = "
    "false`, or `.chat(MODEL)`), or switch on `store-responses` under [serve]"
)


@ROUTES.post("/v1/responses", reply=wire.ResponseReply, streams=True)
async def create_response(context: RequestContext, body: wire.ResponsesRequest) -> Response:
    """Answer a conversation."""
    whole = with_previous(context, with_references(context, body))
    context.ignore([f"include={name}" for name in body.include or () if name != wire.LOGPROBS])
    if body.store is True and context.endpoint.responses is None:
        context.ignore(["store"])
    responses = context.endpoint.responses if body.store in (None, True) else None
    name = f"resp_{secrets.token_hex(24) if responses is not None else context.plain_id}"
    store = None
    if responses is not None:
        store = functools.partial(_store, responses, context.key, tuple(_own_items(whole)))
    return await answer(
        context,
        whole,
        lambda info: [translate.response_request(whole, info)],
        lambda model, info: ResponseRenderer(name, model, whole, store=store),
        stream=bool(body.stream),
    )


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


def with_previous(context: RequestContext, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Put the conversation of `previous_response_id` before the input. Raises Problem 400."""
    name, param = body.previous_response_id, "previous_response_id"
    if name is None:
        return body
    store = context.endpoint.responses
    if store is None:
        raise unsupported(param, _OFF)
    previous = store.find(context.key, name)
    if previous is None:
        message = f"Previous response with id '{name}' not found."
        raise Problem(400, message, param=param, code="previous_response_not_found")
    items = [*previous.conversation, *_output_items(previous), *_own_items(body)]
    return msgspec.structs.replace(body, input=items)


def with_references(context: RequestContext, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Replace each `item_reference` by the stored item. Raises Problem 400 if it is not stored."""
    if isinstance(body.input, str):
        return body
    items = [_resolve(context, item) for item in body.input]
    return msgspec.structs.replace(body, input=items)


def _resolve(context: RequestContext, item: wire.Item) -> wire.Item:
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


def _store(
    store: ResponseStore, key: str, conversation: tuple[wire.Item, ...], reply: wire.ResponseReply
) -> None:
    encoded = msgspec.json.encode(reply)
    size_bytes = len(encoded) + len(msgspec.json.encode(conversation))
    store.add(key, reply.id, StoredResponse(encoded, conversation, size_bytes))


def find_stored(context: RequestContext) -> tuple[ResponseStore, StoredResponse]:
    """Return the store and the response whose id is in the path. Raises Problem 404."""
    store, name = context.endpoint.responses, context.path_id
    if store is not None and (response := store.find(context.key, name)) is not None:
        return store, response
    hint = f": {_OFF}" if store is None else ""
    raise Problem(404, f"Response with id '{name[:200]}' not found{hint}.", code="not_found")


def _own_items(body: wire.ResponsesRequest) -> list[wire.Item]:
    if isinstance(body.input, str):
        return [wire.MessageItem(role="user", content=body.input)]
    return body.input


def _output_items(response: StoredResponse) -> list[wire.Item]:
    output = msgspec.json.decode(response.reply)["output"]
    if not output:
        return []
    return _own_items(LenientDecoder().read({"input": output}, wire.ResponsesRequest))


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode an error as the event `error`, if there is no renderer to send `response.failed`."""
    event = {
        "type": "error",
        "code": problem.code,
        "message": error_text(problem),
        "param": problem.param,
        "sequence_number": 0,
    }
    return sse(event, "error")


RESPONSES = Dialect(name="responses", operations=ROUTES, **ERRORS | {"error_events": error_events})
