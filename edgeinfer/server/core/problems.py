"""The one place where an error becomes an HTTP answer: its status, and OpenAI's or Anthropic's
envelope.

A `Problem` is raised by the endpoint itself (authentication, limits, bodies); every `EdgeInferError` is
turned into one. Messages of unexpected exceptions never leave the process: the client gets the request
id, the log gets the traceback.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from edgeinfer import errors as e
from edgeinfer.server.anthropic.wire import AnthropicError, AnthropicErrorBody
from edgeinfer.server.openai.wire_replies import ErrorBody, ErrorReply

Dialect = Literal["openai", "anthropic"]

#: Status → Anthropic's error type. Source: Anthropic's API reference, "Errors".
_ANTHROPIC_TYPES = {
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
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]*)`")

#: How msgspec begins a message → OpenAI's code for it; `*` stands for the type, which is part of the
#: code's name.
_CODES = (
    (re.compile(r"Object contains unknown field"), "unknown_parameter"),
    (re.compile(r"Object missing required field"), "missing_required_parameter"),
    (re.compile(r"Expected `int` [<]"), "integer_above_max_value"),
    (re.compile(r"Expected `int` [>]"), "integer_below_min_value"),
    (re.compile(r"Expected `float` [<]"), "decimal_above_max_value"),
    (re.compile(r"Expected `float` [>]"), "decimal_below_min_value"),
    (re.compile(r"Expected `str` of length <"), "string_above_max_length"),
    (re.compile(r"Expected `str` of length >"), "string_below_min_length"),
    (re.compile(r"Expected `array` of length <"), "array_above_max_length"),
    (re.compile(r"Expected `array` of length >"), "array_below_min_length"),
    (re.compile(r"Invalid (?:enum )?value"), "invalid_value"),
    (re.compile(r"Number out of range"), "invalid_value"),
    (re.compile(r"Expected `[^`]*`(?:, got|$)"), "invalid_type"),
)

#: Our error → (status, OpenAI's type, code or None for the error's own, seconds to wait or None).
_ANSWERS: dict[type[e.EdgeInferError], tuple[int, str, str | None, int | None]] = {
    e.EdgeInferError: (500, "server_error", None, None),
    e.UsageError: (400, "invalid_request_error", None, None),
    e.UnknownModelError: (404, "invalid_request_error", "model_not_found", None),
    e.ModelNotPulledError: (404, "invalid_request_error", "model_not_found", None),
    e.InvalidRequestError: (400, "invalid_request_error", "invalid_value", None),
    e.ContextLengthError: (400, "invalid_request_error", "context_length_exceeded", None),
    e.UnsupportedConstraintError: (400, "invalid_request_error", "unsupported_schema", None),
    e.QueueFullError: (503, "server_error", "queue_full", 1),
    e.OutOfMemoryError: (503, "server_error", "out_of_memory", 10),
    e.EngineClosedError: (503, "server_error", "model_unavailable", 1),
    e.ModelBusyError: (503, "server_error", None, 5),
}


class Problem(Exception):
    """An answer that is not a success. `allow` lists the methods of a 405; `retry_after_s` becomes
    Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    def body(self, dialect: Dialect, request_id: str) -> bytes:
        """The JSON envelope that the route's clients understand."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            error = AnthropicErrorBody(type=kind, message=self.message)
            return msgspec.json.encode(AnthropicError(error=error, request_id=request_id))
        return msgspec.json.encode(
            ErrorReply(
                error=ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code)
            )
        )


def from_error(error: e.EdgeInferError) -> Problem:
    """The answer to one of our errors. A subclass without a row takes its parent's."""
    status, kind, code, wait_s = next(_ANSWERS[c] for c in type(error).__mro__ if c in _ANSWERS)
    param = getattr(error, "param", None)
    message = error.message
    if error.hint and status < 500:
        message = f"{message} ({error.hint})"
    return Problem(
        status,
        message,
        kind=kind,
        param=param,
        code=code or error.code.replace("-", "_"),
        retry_after_s=wait_s,
    )


def from_validation(error: msgspec.ValidationError) -> Problem:
    """The answer to a body that does not fit its type: `param` is the place in it, `code` OpenAI's."""
    text = str(error)
    code = next((code for pattern, code in _CODES if pattern.match(text)), "invalid_value")
    path = _PATH.search(text)
    param = path[1] if path else ""
    field = _FIELD.search(text)
    if field:
        param = f"{param}.{field[1]}" if param else field[1]
    said = text[: path.start()] if path else text
    if code == "unknown_parameter":
        said = f"Unknown or unsupported parameter: '{param}'"
    elif code == "missing_required_parameter":
        said = f"Missing required parameter: '{param}'"
    elif param:
        said = f"Invalid '{param}': {said.replace('`', '')}"
    return Problem(400, said + ".", param=param or None, code=code)


def internal(request_id: str) -> Problem:
    """The answer to a defect of ours; what happened is in the log under this request's id."""
    return Problem(
        500,
        f"Internal error; the log has it under request id {request_id}.",
        kind="server_error",
        code="internal_error",
    )
