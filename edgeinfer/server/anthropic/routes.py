"""Routes of Anthropic's Messages API, which coding agents use."""

from __future__ import annotations

from starlette.responses import Response

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.anthropic import translate, wire
from edgeinfer.server.anthropic.render import MessageRenderer, error_body, error_events
from edgeinfer.server.context import RequestContext, engine_call
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation_response import answer
from edgeinfer.server.request_fields import refuse_pictures, stop_strings

ROUTES = RouteTable()


@ROUTES.post("/v1/messages", reply=wire.MessageReply, streams=True)
async def messages(context: RequestContext, body: wire.MessagesRequest) -> Response:
    """Answer a conversation."""
    name, stops = f"msg_{context.plain_id}", stop_strings(body.stop_sequences)
    return await answer(
        context,
        body,
        lambda info: [translate.messages_request(body, info)],
        lambda model, info: MessageRenderer(name, model, stops),
        stream=body.stream,
    )


@ROUTES.post("/v1/messages/count_tokens")
@engine_call
def count_tokens(
    context: RequestContext, body: wire.CountRequest, engine: Engine
) -> wire.TokenCountReply:
    """Count a conversation's tokens."""
    turns = context.normalize(translate.conversation(body))
    conversation = GenerateRequest(messages=turns, tools=translate.tools_of(body))
    refuse_pictures(conversation, engine.info)
    return wire.TokenCountReply(input_tokens=len(engine.tokenize_chat(conversation)))


ANTHROPIC = Dialect(
    name="anthropic",
    error_type=wire.AnthropicError,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
