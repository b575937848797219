"""Records that a running process publishes, for `edgeinfer ps` and `snapshots take`.

A record is a memfd, which disappears with the process. /proc shows a process's memfds only to the same
user, so a record may contain words of a prompt.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: Names of records. The types of their values are CacheReport (of the latest prompt), ReplicasInfo,
#: LayersInfo and ProcessDescription, in this order.
CACHE_REPORT, REPLICAS = "edgeinfer-last-prompt", "edgeinfer-replicas"
LAYERS, DESCRIPTION = "edgeinfer-layers", "edgeinfer-description"


class ProcessRecord:
    """A named value that this process publishes; `read_process_record` reads it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = -1

    def write(self, value: msgspec.Struct) -> None:
        """Replace the record's value. Does nothing on systems other than Linux."""
        if self._fd < 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(self._name)
        if self._fd >= 0:
            raw = msgspec.json.encode(value)
            os.ftruncate(self._fd, len(raw))
            os.pwrite(self._fd, raw, 0)


def read_process_record(pid: int, name: str, kind: type[T]) -> T | None:
    """Return the record `name` of process `pid`, decoded as `kind`.

    None if the process has no such record, belongs to another user, or ends meanwhile.
    """
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None
    for number in numbers:
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # the process may end meanwhile
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name}"):
                with open(f"{folder}/{number}", "rb") as file:
                    return msgspec.json.decode(file.read(), type=kind)
    return None
