"""OpenAI's Responses: OpenAI's envelope for refusals, an event of its own for failing streams."""

from __future__ import annotations

import msgspec

from edgeinfer.server.dialect import Dialect, Lookup, Operation
from edgeinfer.server.openai.render import error_body, sentence
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem
from edgeinfer.server.responses import routes, wire


def error_events(problem: Problem, request_id: str) -> bytes:
    """The `error` event, as its API sends it when it cannot send `response.failed`."""
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
    operations=(
        Operation(
            "/v1/responses",
            routes.responses,
            "Answer a conversation.",
            body=wire.ResponsesRequest,
            reply=wire.ResponseReply,
            streams=True,
            may_store=True,
        ),
        Lookup(
            "/v1/responses/{id}",
            routes.stored_response,
            "A stored response, or its stream from behind an event.",
            query=wire.StoredQuery,
            reply=wire.ResponseReply,
            streams=True,
        ),
        Operation(
            "/v1/responses/{id}",
            routes.delete_response,
            "Forget a stored response, and end it if it is being made.",
            method="DELETE",
            reply=wire.DeletedResponse,
            uses_model=False,
        ),
        Operation(
            "/v1/responses/{id}/cancel",
            routes.cancel_response,
            "End a response that is made in the background.",
            reply=wire.ResponseReply,
            uses_model=False,
        ),
        Lookup(
            "/v1/responses/{id}/input_items",
            routes.input_items,
            "What a stored response answers.",
            query=wire.InputItemsQuery,
            reply=wire.InputItems,
        ),
        Operation(
            "/v1/responses/input_tokens",
            routes.input_tokens,
            "Count a conversation's tokens.",
            body=wire.ResponsesRequest,
            reply=wire.InputTokensReply,
        ),
    ),
)
