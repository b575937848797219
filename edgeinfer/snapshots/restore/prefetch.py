"""Read a model's files into the page cache ahead of the faults of the first decode.

A thread reads them in order if a sample is not cached. Cached pages are left alone: mapping them in
advance (MADV_POPULATE_READ) was measured to cost as much as the faults it saves
(docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import os
import threading

from edgeinfer.platform.page_cache import is_cached, is_cold
from edgeinfer.runtime.llama.mappings import HUGEPAGE, Area, Range, advise

#: Bytes of one read: a huge page.
STEP_BYTES = 2 << 20


def start_prefetch(mapped: list[Area]) -> None:
    """Read the uncached parts of these file mappings in the background."""
    cold = []
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        cold = [area for area in mapped if is_cold(area.path)]
    if cold:
        threading.Thread(target=_read_all, args=[cold], name="prefetch", daemon=True).start()


def _read_all(cold: list[Area]) -> None:
    advise((Range(area.low, area.high) for area in cold), HUGEPAGE)
    with contextlib.suppress(OSError):
        for area in cold:
            read_ahead(area)


def read_ahead(area: Area) -> int:
    """Read the uncached bytes of a mapping's file, and return their number. Raises OSError."""
    into, n_bytes = memoryview(bytearray(STEP_BYTES)), 0
    end = area.offset + area.high - area.low
    with open(area.path, "rb", buffering=0) as file:
        for at in range(area.offset, end, STEP_BYTES):
            size = min(STEP_BYTES, end - at)
            if not is_cached(file.fileno(), at + size - 1):
                n_bytes += os.preadv(file.fileno(), [into[:size]], at)
    return n_bytes
