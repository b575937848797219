"""Ollama's API."""

from __future__ import annotations

from edgeinfer.server.dialect import Dialect, Lookup, Operation
from edgeinfer.server.ollama import model_admin, routes, wire
from edgeinfer.server.ollama.render import error_body, error_line, waiting_line

OLLAMA = Dialect(
    name="ollama",
    error_type=wire.OllamaError,
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
            reply=wire.OllamaChatReply,
            streams=True,
        ),
        Operation(
            "/api/generate",
            routes.generate,
            "Answer a prompt, go on with it, or fill the gap before a suffix.",
            body=wire.OllamaGenerateRequest,
            reply=wire.OllamaGenerateReply,
            streams=True,
        ),
        Operation(
            "/api/embed",
            routes.embed,
            "Embed texts.",
            body=wire.OllamaEmbedRequest,
            reply=wire.OllamaEmbedReply,
        ),
        Operation(
            "/api/embeddings",
            routes.embeddings,
            "Embed a text, as before /api/embed.",
            body=wire.OllamaEmbeddingsRequest,
            reply=wire.OllamaEmbeddingsReply,
        ),
        Lookup("/api/tags", routes.tags, "The pulled models.", reply=wire.OllamaTags),
        Lookup("/api/ps", routes.running, "The loaded models.", reply=wire.OllamaProcesses),
        Operation(
            "/api/show",
            routes.show,
            "What a model is and can do.",
            body=wire.OllamaShowRequest,
            reply=wire.OllamaShowReply,
            uses_model=False,
        ),
        Lookup(
            "/api/version",
            routes.version,
            "The version of Ollama's API that is followed here.",
            reply=wire.OllamaVersion,
        ),
        Operation(
            "/api/pull",
            model_admin.pull,
            "Fetch a model; a line a report.",
            body=wire.OllamaPullRequest,
            reply=wire.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            "/api/create",
            model_admin.create,
            "Name a file of this machine, or a model once more.",
            body=wire.OllamaCreateRequest,
            reply=wire.OllamaStatus,
            streams=True,
            is_admin=True,
        ),
        Operation(
            "/api/copy",
            model_admin.copy,
            "Give a model another name beside its own.",
            body=wire.OllamaCopyRequest,
            reply=wire.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            "/api/delete",
            model_admin.delete,
            "Remove a model.",
            method="DELETE",
            body=wire.OllamaDeleteRequest,
            reply=wire.OllamaStatus,
            uses_model=False,
            is_admin=True,
        ),
        Operation(
            "/api/push",
            model_admin.push,
            "Refused: nothing is pushed from here.",
            reply=wire.OllamaStatus,
            uses_model=False,
        ),
        Operation(
            "/api/blobs/{id}",
            model_admin.blob,
            "Refused: files are not uploaded here.",
            reply=wire.OllamaStatus,
            uses_model=False,
        ),
    ),
)
