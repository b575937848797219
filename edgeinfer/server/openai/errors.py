"""OpenAI's error envelope."""

from __future__ import annotations

import msgspec

from edgeinfer.server.core.problems import Problem
from edgeinfer.server.openai.wire_replies import ErrorBody, ErrorReply

DONE = b"data: [DONE]\n\n"


def sentence(problem: Problem) -> str:
    """The message; a prompt that is too long is told in the words by which clients know it."""
    if problem.lengths is None:
        return problem.message
    n_tokens, n_ctx = problem.lengths
    known = (
        f"This model's maximum context length is {n_ctx} tokens. However, your messages resulted in "
        f"{n_tokens} tokens, which exceeds the context window."
    )
    return f"{known} Here {problem.message}"


def error_body(problem: Problem, request_id: str) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; OpenAI's has no place for the request's id."""
    error = ErrorBody(
        message=sentence(problem), type=problem.kind, param=problem.param, code=problem.code
    )
    return msgspec.json.encode(ErrorReply(error=error))


def error_events(problem: Problem, request_id: str) -> bytes:
    """The envelope as the last chunk of a stream."""
    return b"data: " + error_body(problem, request_id) + b"\n\n" + DONE
