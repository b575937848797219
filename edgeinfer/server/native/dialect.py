"""Routes of our own, with OpenAI's error envelope."""

from __future__ import annotations

from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.native import llama_routes, llama_wire, routes, wire
from edgeinfer.server.openai.errors import error_body, error_events
from edgeinfer.server.openai.wire_replies import ErrorReply

NATIVE = Dialect(
    name="native",
    error_type=ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=(
        Operation(
            path="/v1/models/{id}/unload",
            handler=routes.unload,
            summary="Give a model's memory back.",
            reply=wire.UnloadReply,
            uses_model=False,
        ),
        Operation(
            path="/v1/rerank",
            handler=routes.rerank,
            summary="Order documents by relevance.",
            body=wire.RerankRequest,
            reply=wire.RerankReply,
        ),
        Operation(
            path="/reranking",
            handler=routes.rerank,
            summary="Order documents by relevance, under llama.cpp's other name.",
            body=wire.RerankRequest,
            reply=wire.RerankReply,
        ),
        Operation(
            path="/completion",
            handler=llama_routes.completion,
            summary="Continue a text, in llama.cpp's shape.",
            body=llama_wire.LlamaCompletion,
            reply=llama_wire.LlamaAnswer,
            streams=True,
        ),
        Operation(
            path="/infill",
            handler=llama_routes.infill,
            summary="Write what stands between a prefix and a suffix, in llama.cpp's shape.",
            body=llama_wire.LlamaInfill,
            reply=llama_wire.LlamaAnswer,
            streams=True,
        ),
        Operation(
            path="/embedding",
            handler=llama_routes.embedding,
            summary="Embed texts, in llama.cpp's shape.",
            body=llama_wire.LlamaEmbedding,
            reply=llama_wire.LlamaVector,
            is_list=True,
        ),
        Operation(
            method="GET",
            path="/lora-adapters",
            handler=llama_routes.adapters,
            summary="The default model's adapters, in llama.cpp's shape.",
            reply=llama_wire.Adapter,
            is_list=True,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/version",
            handler=llama_routes.version,
            summary="This program's version.",
            reply=llama_wire.Version,
            uses_model=False,
        ),
        Operation(
            path="/tokenize",
            handler=routes.tokenize,
            summary="Text to tokens.",
            body=wire.TokenizeRequest,
            reply=wire.TokenizeReply,
        ),
        Operation(
            path="/detokenize",
            handler=routes.detokenize,
            summary="Tokens to text.",
            body=wire.DetokenizeRequest,
            reply=wire.DetokenizeReply,
        ),
        Operation(
            path="/apply-template",
            handler=routes.apply_template,
            summary="The prompt that a conversation becomes.",
            body=wire.ApplyTemplateRequest,
            reply=wire.ApplyTemplateReply,
        ),
        Operation(
            method="GET",
            path="/infer",
            handler=routes.infer_get,
            summary="One prompt, one answer.",
            query=wire.InferQuery,
            reply=wire.InferReply,
        ),
        Operation(
            path="/infer",
            handler=routes.infer_post,
            summary="One prompt, one answer; the prompt is in the query or in the body.",
            body=wire.InferRequest,
            reply=wire.InferReply,
        ),
        Operation(
            method="GET",
            path="/health",
            handler=routes.health,
            summary="Whether the default model is ready; 503 with progress while it loads.",
            reply=wire.Health,
            also={"503": wire.Health},
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/props",
            handler=routes.props,
            summary="What this endpoint is and holds.",
            reply=wire.Props,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/slots",
            handler=routes.slots,
            summary="What was remembered of the latest prompts, and where each went a way of its own.",
            reply=wire.Slots,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/metrics",
            handler=routes.metrics,
            summary="Prometheus metrics.",
            reply_type="text/plain",
            uses_model=False,
        ),
    ),
)
