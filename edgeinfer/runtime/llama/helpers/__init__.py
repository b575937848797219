"""Programs that use llama.cpp in a separate process, and report with lines of JSON on stdout."""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO

import msgspec


def report(code: int = 0, /, **fields: Any) -> int:
    """Write `fields` to stdout as a line of JSON; return `code`, the exit status for `main`."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code


def take_stdout() -> BinaryIO:
    """Return stdout for results. From now on, output that libraries print goes to stderr."""
    stdout = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return stdout
