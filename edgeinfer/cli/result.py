"""The results of verbs, which `main` prints as text or as JSON."""

from __future__ import annotations

import msgspec

from edgeinfer import error_text
from edgeinfer.errors import EdgeInferError, kebab, to_fields

#: Version of the JSON output: a new key does not change it, a removed or renamed key does.
SCHEMA = "edgeinfer/1"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verb. `exit_code` is the exit status, 0 if nothing is wrong."""

    @property
    def exit_code(self) -> int:
        return 0

    def human(self) -> str:
        """Return the text for stdout; "" prints nothing."""
        return ""


class TimedResult(Result, frozen=True, kw_only=True):
    """A result with its duration `wall_s` (s), which `main` measures."""

    wall_s: float = 0.0


def envelope(result: Result) -> bytes:
    """Encode a result as one line of JSON: `{"schema", "kind", "ok", "result"}`.

    `kind` is the class's name in kebab case without "Result": "pull-adapter" for `PullAdapterResult`.
    `ok` is true if the exit status is 0.
    """
    kind = kebab(type(result).__name__.removesuffix("Result"))
    body = {"schema": SCHEMA, "kind": kind, "ok": result.exit_code == 0, "result": result}
    return msgspec.json.encode(body)


def error_envelope(error: EdgeInferError) -> bytes:
    """Encode an error as a line of JSON: `{"schema", "kind": "error", "ok": false, "error"}`.

    `error` has `code`, `message` and `hint`, and `param` or `key` if known. `errors.from_fields`
    decodes `error`.
    """
    body = {**to_fields(error), "hint": error_text.hint(error)}
    return msgspec.json.encode({"schema": SCHEMA, "kind": "error", "ok": False, "error": body})
