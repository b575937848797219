"""Ollama's error envelope."""

from __future__ import annotations

import msgspec

from edgeinfer.server.core.problems import Problem
from edgeinfer.server.ollama.wire_replies import OllamaError

#: Our code → how Ollama's own message for it begins: clients look for these words.
_BEGINNINGS = {
    "model_not_found": "model not found: ",
    "context_length_exceeded": "the input length exceeds the context length: ",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """`{"error": "…"}`; there is no place for the request's id."""
    beginning = _BEGINNINGS.get(problem.code or "", "")
    return msgspec.json.encode(OllamaError(error=beginning + problem.message))


def error_line(problem: Problem, request_id: str) -> bytes:
    """The envelope as the last line of a stream."""
    return error_body(problem, request_id) + b"\n"


def waiting_line(said: str) -> bytes:
    """Keep a stream alive while the model is loaded: white space before its first line."""
    return b" "
