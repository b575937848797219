"""Tell whether a file, or a page of it, is in the page cache."""

from __future__ import annotations

import os
import random
from pathlib import Path

_PROBES = 64
#: A file is cold if a larger share of its pages is uncached. If the share is smaller, page faults read
#: the missing pages soon enough, without a prefetch.
_COLD_PART = 0.05


def is_cold(path: str | Path) -> bool:
    """Return whether over 5 % of a random sample of a file's pages are uncached. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # a probe must not cause readahead
        # probe random offsets: each probe makes the kernel read its page, so a later call would find
        # the same page cached
        offsets = [random.randrange(size) for _ in range(_PROBES)] if size else []
        missing = sum(not is_cached(file.fileno(), offset) for offset in offsets)
    return missing > _PROBES * _COLD_PART


def is_cached(fd: int, offset: int) -> bool:
    """Return whether the page at `offset` of an open file is in the page cache."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
