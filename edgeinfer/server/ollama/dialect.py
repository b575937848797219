"""Ollama's API."""

from __future__ import annotations

from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.ollama import changes, routes, wire
from edgeinfer.server.ollama import wire_replies as replies
from edgeinfer.server.ollama.errors import error_body, error_line, waiting_line

OLLAMA = Dialect(
    name="ollama",
    error_type=replies.OllamaError,
    error_body=error_body,
    error_events=error_line,
    stream_type="application/x-ndjson",
    comment=waiting_line,
    prefix="/api/",
    checks_body_type=False,
    operations=(
        Operation(
            path="/api/chat",
            handler=routes.chat,
            summary="Answer a conversation.",
            body=wire.OllamaChatRequest,
            reply=replies.OllamaChatReply,
            streams=True,
        ),
        Operation(
            path="/api/generate",
            handler=routes.generate,
            summary="Answer a prompt, go on with it, or fill the gap before a suffix.",
            body=wire.OllamaGenerateRequest,
            reply=replies.OllamaGenerateReply,
            streams=True,
        ),
        Operation(
            path="/api/embed",
            handler=routes.embed,
            summary="Embed texts.",
            body=wire.OllamaEmbedRequest,
            reply=replies.OllamaEmbedReply,
        ),
        Operation(
            path="/api/embeddings",
            handler=routes.embeddings,
            summary="Embed a text, as before /api/embed.",
            body=wire.OllamaEmbeddingsRequest,
            reply=replies.OllamaEmbeddingsReply,
        ),
        Operation(
            method="GET",
            path="/api/tags",
            handler=routes.tags,
            summary="The pulled models.",
            reply=replies.OllamaTags,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/api/ps",
            handler=routes.running,
            summary="The loaded models.",
            reply=replies.OllamaProcesses,
            uses_model=False,
        ),
        Operation(
            path="/api/show",
            handler=routes.show,
            summary="What a model is and can do.",
            body=wire.OllamaShowRequest,
            reply=replies.OllamaShowReply,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/api/version",
            handler=routes.version,
            summary="The version of Ollama's API that is followed here.",
            reply=replies.OllamaVersion,
            uses_model=False,
        ),
        Operation(
            path="/api/pull",
            handler=changes.pull,
            summary="Fetch a model; a line a report.",
            body=wire.OllamaPullRequest,
            reply=replies.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            path="/api/create",
            handler=changes.create,
            summary="Name a file of this machine, or a model once more.",
            body=wire.OllamaCreateRequest,
            reply=replies.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            path="/api/copy",
            handler=changes.copy,
            summary="Give a model another name beside its own.",
            body=wire.OllamaCopyRequest,
            reply=replies.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            method="DELETE",
            path="/api/delete",
            handler=changes.delete,
            summary="Remove a model.",
            body=wire.OllamaDeleteRequest,
            reply=replies.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            path="/api/push",
            handler=changes.push,
            summary="Refused: nothing is pushed from here.",
            reply=replies.OllamaStatus,
            uses_model=False,
        ),
        Operation(
            path="/api/blobs/{id}",
            handler=changes.blob,
            summary="Refused: files are not uploaded here.",
            reply=replies.OllamaStatus,
            uses_model=False,
        ),
    ),
)
