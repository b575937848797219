"""Anthropic's messages."""

from __future__ import annotations

from edgeinfer.server.anthropic import routes, wire
from edgeinfer.server.anthropic.render import error_body, error_events
from edgeinfer.server.dialect import Dialect, Operation

ANTHROPIC = Dialect(
    name="anthropic",
    error_type=wire.AnthropicError,
    error_body=error_body,
    error_events=error_events,
    operations=(
        Operation(
            "/v1/messages",
            routes.messages,
            "Answer a conversation.",
            body=wire.MessagesRequest,
            reply=wire.MessageReply,
            streams=True,
        ),
        Operation(
            "/v1/messages/count_tokens",
            routes.count_tokens,
            "Count a conversation's tokens.",
            body=wire.CountRequest,
            reply=wire.TokenCountReply,
        ),
    ),
)
