"""OpenAI's chat completions, completions, embeddings and models, and OpenAI's error envelope."""

from __future__ import annotations

from edgeinfer.server.batches import BatchObject, FileObject
from edgeinfer.server.dialect import Dialect, Lookup, Operation
from edgeinfer.server.openai import batches, routes, wire
from edgeinfer.server.openai.render import error_body, error_events

OPENAI = Dialect(
    name="openai",
    error_type=wire.ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=(
        Operation(
            "/v1/chat/completions",
            routes.chat_completions,
            "Answer a conversation.",
            body=wire.ChatRequest,
            reply=wire.ChatCompletion,
            streams=True,
        ),
        Operation(
            "/v1/completions",
            routes.completions,
            "Continue a text.",
            body=wire.CompletionRequest,
            reply=wire.Completion,
            streams=True,
        ),
        Operation(
            "/v1/embeddings",
            routes.embeddings,
            "Embed texts.",
            body=wire.EmbeddingRequest,
            reply=wire.EmbeddingReply,
        ),
        Lookup("/v1/models", routes.list_models, "The pulled models.", reply=wire.ModelList),
        Lookup("/v1/models/{id}", routes.one_model, "One pulled model.", reply=wire.ModelCard),
        Operation(
            "/v1/files",
            batches.upload,
            "Keep a file of requests, a multipart form with `file` and `purpose`.",
            reply=FileObject,
            uses_model=False,
        ),
        Lookup("/v1/files/{id}", batches.one_file, "A file of requests or answers.", reply=FileObject),
        Lookup(
            "/v1/files/{id}/content",
            batches.content_of,
            "The lines of a file.",
            reply_type="application/jsonl",
        ),
        Operation(
            "/v1/files/{id}",
            batches.delete_file,
            "Delete a file.",
            method="DELETE",
            reply=batches.FileDeleted,
            uses_model=False,
        ),
        Operation(
            "/v1/batches",
            batches.create,
            "Answer a file of requests in the background.",
            body=batches.BatchRequest,
            reply=BatchObject,
            uses_model=False,
        ),
        Lookup("/v1/batches/{id}", batches.one_batch, "How far a batch is.", reply=BatchObject),
        Operation(
            "/v1/batches/{id}/cancel",
            batches.cancel,
            "End a batch; what it has answered is kept.",
            reply=BatchObject,
            uses_model=False,
        ),
    ),
)
