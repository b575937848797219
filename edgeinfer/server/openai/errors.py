"""OpenAI's error envelope."""

from __future__ import annotations

import msgspec

from edgeinfer.server.core.problems import Problem
from edgeinfer.server.openai.wire_replies import ErrorBody, ErrorReply

DONE = b"data: [DONE]\n\n"


def error_body(problem: Problem, request_id: str) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; OpenAI's has no place for the request's id."""
    error = ErrorBody(
        message=problem.message, type=problem.kind, param=problem.param, code=problem.code
    )
    return msgspec.json.encode(ErrorReply(error=error))


def error_events(problem: Problem, request_id: str) -> bytes:
    """The envelope as the last chunk of a stream."""
    return b"data: " + error_body(problem, request_id) + b"\n\n" + DONE
