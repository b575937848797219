"""Every route, once: the router, the metrics' labels and the OpenAPI document are made from this
list.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.server.anthropic import routes as anthropic
from edgeinfer.server.anthropic import wire as anthropic_wire
from edgeinfer.server.core.problems import Dialect
from edgeinfer.server.native import routes as native
from edgeinfer.server.native import wire as native_wire
from edgeinfer.server.openai import routes as openai
from edgeinfer.server.openai import wire as openai_wire
from edgeinfer.server.openai import wire_replies as openai_replies
from edgeinfer.server.responses import routes as responses
from edgeinfer.server.responses import wire as responses_wire

Handler = Callable[[Request], Awaitable[Response]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `uses_model`: it counts against the limits and is refused while
    draining.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    reply: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    streams: bool = False
    dialect: Dialect = "openai"
    uses_model: bool = True
    reply_type: str = "application/json"


def _post(
    path: str, handler: Handler, summary: str, body: type[msgspec.Struct], reply: type[msgspec.Struct]
) -> Operation:
    return Operation(method="POST", path=path, handler=handler, summary=summary, body=body, reply=reply)


def _streaming(operation: Operation, dialect: Dialect = "openai") -> Operation:
    return msgspec.structs.replace(operation, streams=True, dialect=dialect)


def _asked(path: str, handler: Handler, summary: str, reply: type[msgspec.Struct] | None) -> Operation:
    return Operation(
        method="GET", path=path, handler=handler, summary=summary, reply=reply, uses_model=False
    )


OPERATIONS: tuple[Operation, ...] = (
    _streaming(
        _post(
            "/v1/chat/completions",
            openai.chat_completions,
            "Answer a conversation.",
            openai_wire.ChatRequest,
            openai_replies.ChatCompletion,
        )
    ),
    _streaming(
        _post(
            "/v1/completions",
            openai.completions,
            "Continue a text.",
            openai_wire.CompletionRequest,
            openai_replies.Completion,
        )
    ),
    _streaming(
        _post(
            "/v1/responses",
            responses.responses,
            "Answer a conversation; nothing is stored.",
            responses_wire.ResponsesRequest,
            responses_wire.ResponseReply,
        )
    ),
    _post(
        "/v1/embeddings",
        openai.embeddings,
        "Embed texts.",
        openai_wire.EmbeddingRequest,
        openai_replies.EmbeddingReply,
    ),
    _streaming(
        _post(
            "/v1/messages",
            anthropic.messages,
            "Answer a conversation.",
            anthropic_wire.MessagesRequest,
            anthropic_wire.MessageReply,
        ),
        "anthropic",
    ),
    msgspec.structs.replace(
        _post(
            "/v1/messages/count_tokens",
            anthropic.count_tokens,
            "Count a conversation's tokens.",
            anthropic_wire.CountRequest,
            anthropic_wire.TokenCountReply,
        ),
        dialect="anthropic",
    ),
    _asked("/v1/models", openai.list_models, "The pulled models.", openai_replies.ModelList),
    _asked("/v1/models/{id}", openai.one_model, "One pulled model.", openai_replies.ModelCard),
    Operation(
        method="POST",
        path="/v1/models/{id}/unload",
        handler=native.unload,
        summary="Give a model's memory back.",
        reply=native_wire.UnloadReply,
        uses_model=False,
    ),
    _post(
        "/v1/rerank",
        native.rerank,
        "Order documents by relevance.",
        native_wire.RerankRequest,
        native_wire.RerankReply,
    ),
    _post(
        "/tokenize",
        native.tokenize,
        "Text to tokens.",
        native_wire.TokenizeRequest,
        native_wire.TokenizeReply,
    ),
    _post(
        "/detokenize",
        native.detokenize,
        "Tokens to text.",
        native_wire.DetokenizeRequest,
        native_wire.DetokenizeReply,
    ),
    _post(
        "/apply-template",
        native.apply_template,
        "The prompt that a conversation becomes.",
        native_wire.ApplyTemplateRequest,
        native_wire.ApplyTemplateReply,
    ),
    Operation(
        method="GET",
        path="/infer",
        handler=native.infer_get,
        summary="One prompt, one answer.",
        query=native_wire.InferQuery,
        reply=native_wire.InferReply,
    ),
    Operation(
        method="POST",
        path="/infer",
        handler=native.infer_post,
        summary="One prompt, one answer; the prompt is in the query or in the body.",
        body=native_wire.InferRequest,
        reply=native_wire.InferReply,
    ),
    _asked(
        "/health",
        native.health,
        "Whether the default model is ready; 503 with progress while it loads.",
        native_wire.Health,
    ),
    _asked("/props", native.props, "What this endpoint is and holds.", native_wire.Props),
    msgspec.structs.replace(
        _asked("/metrics", native.metrics, "Prometheus metrics.", None), reply_type="text/plain"
    ),
)
