"""HTTP errors with status, code and message, independent of the dialect.

The server's code raises `Problem`; an `EdgeInferError` of the engine is converted to a Problem. The
dialect of the route encodes the Problem as JSON. After an unexpected exception the client gets only the
request's id; the log has the traceback under this id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from edgeinfer import errors as e
from edgeinfer.config.load_options import LOAD_OPTIONS

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FOLDERS = re.compile(r"(?<![\w:/.])~?/(?:[^\s/'\"]+/)+")
_FIELD = re.compile(r"field `([^`]*)`")
_MAX_MESSAGES = 16

#: Pattern of the beginning of msgspec's error message → OpenAI's error code.
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

#: Exception → HTTP status, code (None: `EdgeInferError.code`), Retry-After (s; None: no header).
_ANSWERS: dict[type[e.EdgeInferError], tuple[int, str | None, int | None]] = {
    e.EdgeInferError: (500, None, None),
    e.UsageError: (400, None, None),
    e.UnknownModelError: (404, "model_not_found", None),
    e.ModelNotPulledError: (404, "model_not_found", None),
    e.InvalidRequestError: (400, "invalid_value", None),
    e.ContextLengthError: (400, "context_length_exceeded", None),
    e.UnsupportedConstraintError: (400, "unsupported_schema", None),
    e.ReceiptError: (400, "invalid_receipt", None),
    e.InvalidGgufError: (422, "model_unavailable", None),
    e.ModelLoadError: (422, "model_unavailable", None),
    e.QueueFullError: (503, "queue_full", 1),
    e.OutOfMemoryError: (503, "out_of_memory", 10),
    e.EngineClosedError: (503, "model_unavailable", 1),
    e.ModelBusyError: (503, None, 5),
    e.DiskFullError: (507, None, None),
    e.SnapshotsUnavailableError: (409, None, None),
    e.SnapshotStaleError: (409, None, None),
}
#: Status → OpenAI's error type. Other 4xx are `invalid_request_error`.
_KINDS = {403: "permission_error", 429: "rate_limit_error"}


class Problem(Exception):
    """An HTTP error response.

    `param` is the request's field that is wrong, `code` is OpenAI's error code. `retry_after_s` becomes
    the header Retry-After. If the prompt is too long, `lengths` are the sizes (tokens) of prompt and
    context: clients recognize this error by a sentence of their API that contains these sizes.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.lengths = lengths
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def kind(self) -> str:
        """OpenAI's error type, e.g. "invalid_request_error"."""
        if self.status >= 500:
            return "server_error"
        return _KINDS.get(self.status, "invalid_request_error")


def from_error(error: e.EdgeInferError) -> Problem:
    """Convert an EdgeInferError to an HTTP error.

    The table `_ANSWERS` has the status; a class without a row uses the row of its nearest base class.
    """
    status, code, wait_s = next(_ANSWERS[c] for c in type(error).__mro__ if c in _ANSWERS)
    message = error.message_and_hint if status < 500 else error.message
    if status == 422 or status >= 500:
        message = _FOLDERS.sub("", message)  # clients must not learn the server's folders
    return Problem(
        status,
        message,
        param=getattr(error, "param", None),
        code=code or error.code.replace("-", "_"),
        retry_after_s=wait_s,
        lengths=_lengths(error),
    )


def _lengths(error: e.EdgeInferError) -> tuple[int, int] | None:
    if not isinstance(error, e.ContextLengthError) or error.n_tokens is None or error.n_ctx is None:
        return None
    return error.n_tokens, error.n_ctx


def from_validation(error: msgspec.ValidationError, within: str = "") -> Problem:
    """Convert msgspec's error to a Problem 400 that names the wrong field.

    `within` is the path of the value that was decoded, e.g. `messages[0].content`; "" for the body.
    """
    text = str(error)
    code = next((code for pattern, code in _CODES if pattern.match(text)), "invalid_value")
    path = _PATH.search(text)
    param = within + _join_path(path[1], within) if path else within
    field = _FIELD.search(text)
    if field:
        param = f"{param}.{field[1]}" if param else field[1]
    message = text[: path.start()] if path else text
    if code == "unknown_parameter":
        message = f"Unknown or unsupported parameter: '{param}'{load_option_hint(param)}"
    elif code == "missing_required_parameter":
        return missing(param)
    elif param:
        message = f"Invalid '{param}': {message.replace('`', '')}"
    return Problem(400, message + ".", param=param or None, code=code)


def _join_path(path: str, within: str) -> str:
    return f".{path}" if path and within and not path.startswith("[") else path


def merge(problems: Sequence[Problem]) -> Problem:
    """Combine errors about one body: all messages, with `param` and `code` of the first."""
    first = problems[0]
    messages = list(dict.fromkeys(problem.message for problem in problems))
    if len(messages) > _MAX_MESSAGES:
        messages = [*messages[:_MAX_MESSAGES], f"And {len(messages) - _MAX_MESSAGES} more."]
    return Problem(400, " ".join(messages), param=first.param, code=first.code)


def missing(param: str) -> Problem:
    """Make the error for a missing required field."""
    message = f"Missing required parameter: '{param}'."
    return Problem(400, message, param=param, code="missing_required_parameter")


def unsupported(param: str, reason: str) -> Problem:
    """Make the error for a field that is not supported."""
    message = f"'{param}' is not supported here: {reason}."
    return Problem(400, message, param=param, code="unsupported_parameter")


def too_many(message: str, retry_after_s: int) -> Problem:
    return Problem(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def load_option_hint(param: str) -> str:
    """Return a text that names the option of `edgeinfer serve` for the field `param`; "" for none."""
    for option in LOAD_OPTIONS:
        if option.flag and param in (option.field, option.key.replace("-", "_")):
            return f"; it is a load option: start the endpoint with {option.flag}"
    return ""


def unavailable(message: str, code: str, retry_after_s: int) -> Problem:
    """Make an error 503; the client may retry after `retry_after_s`."""
    return Problem(503, message, code=code, retry_after_s=retry_after_s)


def shutting_down() -> Problem:
    """Make the error for a request that arrives while the endpoint drains."""
    return unavailable("The endpoint is shutting down.", "shutting_down", 2)
