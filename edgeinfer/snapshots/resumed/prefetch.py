"""Read weights ahead in the order of the file, when the page cache is cold.

A thread of the resumed process looks at a few pages; when some are not cached it reads what the first
decode will touch, in the order of the file, past what is cached already: the decode's own faults read
too, and neither waits for the other. When they are cached it does nothing: mapping them in advance
(MADV_POPULATE_READ) was measured to cost as much as the faults it saves
(docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import os
import threading

from edgeinfer.runtime.loading.mappings import Area
from edgeinfer.snapshots.resumed import residency

_PROBES = 64
_STEP_BYTES = residency.WINDOW_BYTES
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05

#: Offset and length in a file, in bytes.
Stretch = tuple[int, int]


def start(shared: list[Area]) -> threading.Thread:
    """Read ahead in the background if need be; `shared` is the need of shared mappings."""
    thread = threading.Thread(target=run, args=[shared], name="prefetch", daemon=True)
    thread.start()
    return thread


def run(shared: list[Area]) -> int:
    """Read ahead what is not cached; the bytes read."""
    done = 0
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        for path, mapped in _by_file([*residency.large("p"), *shared]).items():
            stretches = [(area.offset, area.high - area.low) for area in mapped]
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if missing_part(fd, stretches) > _COLD_PART:
                    residency.want_huge_pages(mapped)
                    done += read_ahead(fd, stretches)
            finally:
                os.close(fd)
    return done


def _by_file(mapped: list[Area]) -> dict[str, list[Area]]:
    found: dict[str, list[Area]] = {}
    for area in sorted(mapped, key=lambda area: (area.path, area.offset)):
        found.setdefault(area.path, []).append(area)
    return found


def missing_part(fd: int, stretches: list[Stretch]) -> float:
    """How much of the stretches is not in the page cache, 0 to 1, by a sample."""
    missing = probes = 0
    total = sum(length for _, length in stretches)
    for offset, length in stretches:
        count = max(1, _PROBES * length // total)
        probes += count
        missing += sum(not _is_cached(fd, offset + length * n // count) for n in range(count))
    return missing / probes


def read_ahead(fd: int, stretches: list[Stretch]) -> int:
    """Read the stretches' uncached bytes in steps of whole huge pages; their count."""
    into, done = memoryview(bytearray(_STEP_BYTES)), 0
    for offset, length in stretches:
        at, end = offset, offset + length
        while at < end:
            following = min(at - at % _STEP_BYTES + _STEP_BYTES, end)
            if not _is_cached(fd, following - 1):
                done += os.preadv(fd, [into[: following - at]], at)
            at = following
    return done


def _is_cached(fd: int, offset: int) -> bool:
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
