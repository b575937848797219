"""What the small helper processes of the runtime share: one JSON object a line, and no life after their
parent's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it is gone (Linux; elsewhere
    nothing happens).
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it went while we asked
            os.kill(os.getpid(), signal.SIGKILL)


def say(code: int = 0, /, **fields: Any) -> int:
    """Write one line to stdout at once and return `code`, so that a main can end with it."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code
