"""Programs that run in processes of their own and answer in lines of JSON on stdout."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def say(code: int = 0, /, **fields: Any) -> int:
    """Write one line to stdout at once and return `code`, so that a main can end with it."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code
