"""The page cache: whether it contains a file, or a page of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

_PROBES = 64
#: Share of missing pages from which a file counts as cold; page faults read fewer fast enough.
_COLD_PART = 0.05


def is_cold(path: str | Path) -> bool:
    """Return whether a sample of a file is not cached. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # otherwise a probe reads more
        # at random offsets: probing caches a page, so probing it again would make the file seem warm
        offsets = [random.randrange(size) for _ in range(_PROBES)] if size else []
        missing = sum(not is_cached(file.fileno(), offset) for offset in offsets)
    return missing > _PROBES * _COLD_PART


def is_cached(fd: int, offset: int) -> bool:
    """Return whether the page of an open file at `offset` is cached."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
