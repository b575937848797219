"""Anthropic's error envelope."""

from __future__ import annotations

from typing import Any

import msgspec

from edgeinfer.server.anthropic.wire import AnthropicError, AnthropicErrorBody
from edgeinfer.server.core.problems import Problem

#: Status → Anthropic's error type. Source: Anthropic's API reference, "Errors".
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    error = AnthropicErrorBody(
        type=_TYPES.get(problem.status, "api_error"),
        message=_sentence(problem),
        details=_details(problem),
    )
    return msgspec.json.encode(AnthropicError(error=error, request_id=request_id))


def _sentence(problem: Problem) -> str:
    """Tell of a prompt that is too long in the words by which agents know to compact."""
    if problem.lengths is None:
        return problem.message
    n_tokens, n_ctx = problem.lengths
    return f"prompt is too long: {n_tokens} tokens > {n_ctx} maximum; {problem.message}"


def _details(problem: Problem) -> dict[str, Any] | msgspec.UnsetType:
    """Tell the official client's tool loop to send whole conversations instead of threads."""
    if problem.code != "unsupported_parameter" or problem.param != "thread":
        return msgspec.UNSET
    return {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def error_events(problem: Problem, request_id: str) -> bytes:
    """The `error` event, which ends a stream."""
    return b"event: error\ndata: " + error_body(problem, request_id) + b"\n\n"
