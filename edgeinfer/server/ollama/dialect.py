"""Ollama's API."""

from __future__ import annotations

from edgeinfer.server.core.dialect import Dialect, Lookup, Operation
from edgeinfer.server.ollama import changes, routes, wire
from edgeinfer.server.ollama import wire_replies as replies
from edgeinfer.server.ollama.render import error_body, error_line, waiting_line

OLLAMA = Dialect(
    name="ollama",
    error_type=replies.OllamaError,
    error_body=error_body,
    error_events=error_line,
    stream_type="application/x-ndjson",
    comment=waiting_line,
    prefix="/api/",
    checks_body_type=False,
    answers_any_name=False,
    operations=(
        Operation(
            "/api/chat",
            routes.chat,
            "Answer a conversation.",
            body=wire.OllamaChatRequest,
            reply=replies.OllamaChatReply,
            streams=True,
        ),
        Operation(
            "/api/generate",
            routes.generate,
            "Answer a prompt, go on with it, or fill the gap before a suffix.",
            body=wire.OllamaGenerateRequest,
            reply=replies.OllamaGenerateReply,
            streams=True,
        ),
        Operation(
            "/api/embed",
            routes.embed,
            "Embed texts.",
            body=wire.OllamaEmbedRequest,
            reply=replies.OllamaEmbedReply,
        ),
        Operation(
            "/api/embeddings",
            routes.embeddings,
            "Embed a text, as before /api/embed.",
            body=wire.OllamaEmbeddingsRequest,
            reply=replies.OllamaEmbeddingsReply,
        ),
        Lookup("/api/tags", routes.tags, "The pulled models.", reply=replies.OllamaTags),
        Lookup("/api/ps", routes.running, "The loaded models.", reply=replies.OllamaProcesses),
        Operation(
            "/api/show",
            routes.show,
            "What a model is and can do.",
            body=wire.OllamaShowRequest,
            reply=replies.OllamaShowReply,
            uses_model=False,
        ),
        Lookup(
            "/api/version",
            routes.version,
            "The version of Ollama's API that is followed here.",
            reply=replies.OllamaVersion,
        ),
        Operation(
            "/api/pull",
            changes.pull,
            "Fetch a model; a line a report.",
            body=wire.OllamaPullRequest,
            reply=replies.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            "/api/create",
            changes.create,
            "Name a file of this machine, or a model once more.",
            body=wire.OllamaCreateRequest,
            reply=replies.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            "/api/copy",
            changes.copy,
            "Give a model another name beside its own.",
            body=wire.OllamaCopyRequest,
            reply=replies.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            "/api/delete",
            changes.delete,
            "Remove a model.",
            method="DELETE",
            body=wire.OllamaDeleteRequest,
            reply=replies.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            "/api/push",
            changes.push,
            "Refused: nothing is pushed from here.",
            reply=replies.OllamaStatus,
            uses_model=False,
        ),
        Operation(
            "/api/blobs/{id}",
            changes.blob,
            "Refused: files are not uploaded here.",
            reply=replies.OllamaStatus,
            uses_model=False,
        ),
    ),
)
