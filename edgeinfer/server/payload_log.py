"""The opt-in payload log: requests and answers, as JSON lines, rotated by size, secrets cut out, 0600.

Off unless `--payload-log FILE` is given. `Authorization`, keys and anything that looks like one never
reach it.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec

_KEYS = re.compile(
    r"""
    \b(?: ei-[\w-]{20,} | sk-[\w-]{16,} | hf_\w{16,} | gh[pousr]_\w{20,} | github_pat_\w{20,}
    | glpat-[\w-]{16,} | xox[a-z]-[\w-]{10,} | AIza[\w-]{30,} | AKIA[0-9A-Z]{16}
    | Bearer\s+[\w.~+/-]{16,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]* )  # a JSON Web Token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?:password|passwd|secret|api[_-]?key)["']?\s*[=:]\s*["']?[^\s"'&,;]+
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


class PayloadLog:
    """Appends to `path`; beyond `max_bytes` it becomes `path.1`, and so on up to `keep` old files."""

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 4) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = keep

    def write(self, facts: dict[str, Any], request: bytes, answer: bytes | None) -> None:
        """Append one request with its answer, both as they were sent. Raises OSError."""
        shown = {"request": _shown(request), "answer": None if answer is None else _shown(answer)}
        line = msgspec.json.encode({"ts": round(time.time(), 3), **facts, **shown})
        self._rotate(len(line) + 1)
        descriptor = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, line + b"\n")
        finally:
            os.close(descriptor)

    def _rotate(self, more_bytes: int) -> None:
        try:
            if self.path.stat().st_size + more_bytes <= self.max_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(self.keep, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


def _shown(content: bytes) -> Any:
    try:
        return _without_keys(msgspec.json.decode(content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _without_keys(content.decode("utf-8", "replace"))


def _without_keys(value: Any) -> Any:
    """Replace everything that looks like a secret, in field names too."""
    if isinstance(value, str):
        return _KEYS.sub("<redacted>", value)
    if isinstance(value, dict):
        return {_KEYS.sub("<redacted>", str(k)): _without_keys(item) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_keys(item) for item in value]
    return value
