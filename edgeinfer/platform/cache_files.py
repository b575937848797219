"""JSON files of the cache folder: measurements kept for later processes.

Nothing here raises: an unreadable file is empty, and a value that cannot be written is measured again.
"""

from __future__ import annotations

import contextlib
from typing import Generic, TypeVar

import msgspec

from edgeinfer.errors import DiskFullError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole

T = TypeVar("T")
#: Entries of a table at most; the oldest go first.
MOST_ENTRIES = 1000


class CacheTable(Generic[T]):
    """Values by key in the file `name` of the cache folder; `kind` is the type of the whole."""

    def __init__(self, name: str, kind: type[dict[str, T]]) -> None:
        self._name = name
        self._kind = kind

    def read(self) -> dict[str, T]:
        """Return every value by its key, the oldest first."""
        try:
            return msgspec.json.decode((paths.cache_dir() / self._name).read_bytes(), type=self._kind)
        except (OSError, msgspec.MsgspecError):
            return {}

    def put(self, key: str, value: T) -> None:
        """Add a value, or replace what was under its key."""
        known = self.read()
        known.pop(key, None)
        known[key] = value
        raw = msgspec.json.encode(dict(list(known.items())[-MOST_ENTRIES:]))
        with contextlib.suppress(OSError, DiskFullError):
            paths.cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(paths.cache_dir() / self._name, raw)
