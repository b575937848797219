"""Programs that use llama.cpp in a separate process, and report with lines of JSON on stdout."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def report(code: int = 0, /, **fields: Any) -> int:
    """Write a line of JSON to stdout and return `code`, the exit status for `main`."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code
