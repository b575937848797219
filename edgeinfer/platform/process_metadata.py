"""What a process leaves of itself where `edgeinfer ps` and `snapshots take` find it.

It is left in memory of that process, which `/proc` shows to its user alone: it may hold words of a
prompt, and is gone with the process.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: Names of notes: the latest prompt, the replicas of a model, what is loaded.
CACHE_REPORT, REPLICAS = "edgeinfer-last-prompt", "edgeinfer-replicas"
DESCRIPTION = "edgeinfer-description"


class Note:
    """Where a process leaves its latest note of one name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = -1

    def write(self, value: msgspec.Struct) -> None:
        """Leave this one; Linux alone has a place for it."""
        if self._fd < 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(self._name)
        if self._fd >= 0:
            raw = msgspec.json.encode(value)
            os.ftruncate(self._fd, len(raw))
            os.pwrite(self._fd, raw, 0)


def left_by(pid: int, name: str, kind: type[T]) -> T | None:
    """What the process `pid` has left; None where it left nothing yet, or is somebody else's."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None
    for number in numbers:
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # another one was closed just now
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name}"):
                with open(f"{folder}/{number}", "rb") as file:
                    return msgspec.json.decode(file.read(), type=kind)
    return None
