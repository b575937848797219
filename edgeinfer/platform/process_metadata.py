"""Records that a process publishes for `edgeinfer ps` and `snapshots take`.

They are in that process's memory, which `/proc` shows only to its user: a record may contain words of a
prompt. They disappear with the process.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: Names of records: the latest prompt, a model's replicas, its layers on devices, the loaded model.
CACHE_REPORT, REPLICAS = "edgeinfer-last-prompt", "edgeinfer-replicas"
LAYERS, DESCRIPTION = "edgeinfer-layers", "edgeinfer-description"


class ProcessRecord:
    """A named record that this process publishes; only the latest value is kept."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = -1

    def write(self, value: msgspec.Struct) -> None:
        """Replace the record's value; does nothing off Linux."""
        if self._fd < 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(self._name)
        if self._fd >= 0:
            raw = msgspec.json.encode(value)
            os.ftruncate(self._fd, len(raw))
            os.pwrite(self._fd, raw, 0)


def read_process_record(pid: int, name: str, kind: type[T]) -> T | None:
    """Return the record of process `pid`; None if it has none, or belongs to another user."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None
    for number in numbers:
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # the descriptor may be closed by now
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name}"):
                with open(f"{folder}/{number}", "rb") as file:
                    return msgspec.json.decode(file.read(), type=kind)
    return None
