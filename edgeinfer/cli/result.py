"""The result of a verb: a frozen value that can be converted to text or JSON."""

from __future__ import annotations

import msgspec

from edgeinfer import error_text
from edgeinfer.errors import EdgeInferError, kebab, to_fields

#: Version of the JSON envelope. A new key does not change it; a removed or renamed key does.
SCHEMA = "edgeinfer/1"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A verb's outcome. `exit_code` is 0 unless a finding must fail the command."""

    @property
    def exit_code(self) -> int:
        return 0

    def human(self) -> str:
        """Return the text for stdout; "" prints nothing."""
        return ""


class TimedResult(Result, frozen=True, kw_only=True):
    """An outcome with its duration `wall_s`, which `main` measures."""

    wall_s: float = 0.0


def envelope(result: Result) -> bytes:
    """Encode `{"schema", "kind", "ok": true, "result"}` as one line of JSON.

    `kind` is the class's name in kebab case without "Result": "pull-adapter" for `PullAdapterResult`.
    """
    kind = kebab(type(result).__name__.removesuffix("Result"))
    body = {"schema": SCHEMA, "kind": kind, "ok": result.exit_code == 0, "result": result}
    return msgspec.json.encode(body)


def error_envelope(error: EdgeInferError) -> bytes:
    """Encode the line `{"schema", "kind": "error", "ok", "error": {"code", "message", "hint"}}`.

    `error` also has `param` or `key` if the error names one. `errors.from_fields` decodes it.
    """
    body = {**to_fields(error), "hint": error_text.hint(error)}
    return msgspec.json.encode({"schema": SCHEMA, "kind": "error", "ok": False, "error": body})
