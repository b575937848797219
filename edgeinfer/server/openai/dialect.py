"""OpenAI's chat completions, completions, embeddings and models, and OpenAI's error envelope."""

from __future__ import annotations

from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.openai import routes, wire
from edgeinfer.server.openai import wire_replies as replies
from edgeinfer.server.openai.errors import error_body, error_events

OPENAI = Dialect(
    name="openai",
    error_type=replies.ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=(
        Operation(
            path="/v1/chat/completions",
            handler=routes.chat_completions,
            summary="Answer a conversation.",
            body=wire.ChatRequest,
            reply=replies.ChatCompletion,
            streams=True,
        ),
        Operation(
            path="/v1/completions",
            handler=routes.completions,
            summary="Continue a text.",
            body=wire.CompletionRequest,
            reply=replies.Completion,
            streams=True,
        ),
        Operation(
            path="/v1/embeddings",
            handler=routes.embeddings,
            summary="Embed texts.",
            body=wire.EmbeddingRequest,
            reply=replies.EmbeddingReply,
        ),
        Operation(
            method="GET",
            path="/v1/models",
            handler=routes.list_models,
            summary="The pulled models.",
            reply=replies.ModelList,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v1/models/{id}",
            handler=routes.one_model,
            summary="One pulled model.",
            reply=replies.ModelCard,
            uses_model=False,
        ),
    ),
)
