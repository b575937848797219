"""Read a model's files into the page cache ahead of the faults of the first decode.

A thread reads them in order if a sample is not cached. Cached pages are left alone: mapping them in
advance (MADV_POPULATE_READ) was measured to cost as much as the faults it saves
(docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import os
import threading

from edgeinfer.runtime.llama.mappings import HUGEPAGE, LARGE_BYTES, Area, Range, advise, areas

#: A huge page: what is read at once.
STEP_BYTES = 2 << 20
_PROBES = 64
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05


def mapped_weights() -> list[Area]:
    """Return the large shared mappings of files, in the order of their addresses."""
    return [
        area
        for area in areas()
        if area.path.startswith("/")
        and area.permissions.endswith("s")
        and area.high - area.low >= LARGE_BYTES
    ]


def start_prefetch(mapped: list[Area]) -> None:
    """Read in the background what of these mappings of files is not cached."""
    cold = []
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        cold = [area for area in mapped if missing_part(area) > _COLD_PART]
    if cold:
        threading.Thread(target=_read_all, args=[cold], name="prefetch", daemon=True).start()


def _read_all(cold: list[Area]) -> None:
    advise((Range(area.low, area.high) for area in cold), HUGEPAGE)
    with contextlib.suppress(OSError):
        for area in cold:
            read_ahead(area)


def missing_part(area: Area) -> float:
    """Estimate the uncached part of a mapping's file, 0 to 1, by a sample. Raises OSError."""
    size = area.high - area.low
    with open(area.path, "rb", buffering=0) as file:
        offsets = (area.offset + size * n // _PROBES for n in range(_PROBES))
        return sum(not _is_cached(file.fileno(), offset) for offset in offsets) / _PROBES


def read_ahead(area: Area) -> int:
    """Read the uncached bytes of a mapping's file, and return their number. Raises OSError."""
    into, n_bytes = memoryview(bytearray(STEP_BYTES)), 0
    end = area.offset + area.high - area.low
    with open(area.path, "rb", buffering=0) as file:
        for at in range(area.offset, end, STEP_BYTES):
            size = min(STEP_BYTES, end - at)
            if not _is_cached(file.fileno(), at + size - 1):
                n_bytes += os.preadv(file.fileno(), [into[:size]], at)
    return n_bytes


def _is_cached(fd: int, offset: int) -> bool:
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
