"""The opt-in payload log: requests and answers, as JSON lines, rotated by size, secrets redacted, 0600.

Off unless `--payload-log FILE` is given. `Authorization`, keys and anything that looks like one never
reach it; with `redact=True` texts are replaced by their lengths, which keeps shape and size for
debugging without the words.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec

_KEYS = re.compile(
    r"\b(?:ei-[\w-]{20,}|sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|Bearer\s+[\w.~+/-]{16,})"
)
#: Fields whose text is somebody's words.
_WORDS = frozenset(
    {
        "content",
        "text",
        "prompt",
        "input",
        "arguments",
        "system",
        "instructions",
        "result",
        "query",
        "thinking",
        "output",
    }
)


class PayloadLog:
    """Appends to `path`; beyond `max_bytes` it becomes `path.1`, and so on up to `keep` old files."""

    def __init__(
        self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 4, redact: bool = False
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = keep
        self.redact = redact

    def write(self, request_id: str, route: str, request: Any, answer: Any) -> None:
        """Append one exchange. Raises OSError."""
        line = msgspec.json.encode(
            {
                "ts": round(time.time(), 3),
                "request_id": request_id,
                "route": route,
                "request": self._clean(request, ""),
                "answer": self._clean(answer, ""),
            }
        )
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

    def _clean(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            if self.redact and field in _WORDS:
                return f"<{len(value)} characters>"
            return _KEYS.sub("<redacted>", value)
        if isinstance(value, dict):
            return {
                key: self._clean(item, key if isinstance(key, str) else "")
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._clean(item, field) for item in value]
        return value
