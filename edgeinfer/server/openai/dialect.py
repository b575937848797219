"""OpenAI's chat completions, completions, embeddings and models, and OpenAI's error envelope."""

from __future__ import annotations

from edgeinfer.server.core.batches import BatchObject, FileObject
from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.openai import batches, routes, wire
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
        Operation(
            path="/v1/files",
            handler=batches.upload,
            summary="Keep a file of requests, a multipart form with `file` and `purpose`.",
            reply=FileObject,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v1/files/{id}",
            handler=batches.one_file,
            summary="A file of requests or answers.",
            reply=FileObject,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v1/files/{id}/content",
            handler=batches.content_of,
            summary="The lines of a file.",
            reply_type="application/jsonl",
            uses_model=False,
        ),
        Operation(
            method="DELETE",
            path="/v1/files/{id}",
            handler=batches.delete_file,
            summary="Delete a file.",
            reply=batches.FileDeleted,
            uses_model=False,
        ),
        Operation(
            path="/v1/batches",
            handler=batches.create,
            summary="Answer a file of requests in the background.",
            body=batches.BatchRequest,
            reply=BatchObject,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v1/batches/{id}",
            handler=batches.one_batch,
            summary="How far a batch is.",
            reply=BatchObject,
            uses_model=False,
        ),
        Operation(
            path="/v1/batches/{id}/cancel",
            handler=batches.cancel,
            summary="End a batch; what it has answered is kept.",
            reply=BatchObject,
            uses_model=False,
        ),
    ),
)
