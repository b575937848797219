"""Read weights ahead in the order of the file, when the page cache is cold.

The resumed process looks at a few pages; when some are not cached a thread reads what the first decode
will touch, in the order of the file, past what is cached already: the decode's own faults read too, and
neither waits for the other. When they are cached nothing is done: mapping them in advance
(MADV_POPULATE_READ) was measured to cost as much as the faults it saves
(docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import os
import threading

from edgeinfer.runtime.llama.mappings import Area
from edgeinfer.snapshots.restore import residency

_PROBES = 64
_STEP_BYTES = residency.WINDOW_BYTES
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05

#: Offset and length in a file, in bytes.
Stretch = tuple[int, int]


def start(needed: list[Area]) -> None:
    """Read ahead in the background what of these mappings of files is not cached."""
    cold = []
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        for path, mapped in _by_file(needed).items():
            with open(path, "rb", buffering=0) as file:
                if missing_part(file.fileno(), _stretches(mapped)) > _COLD_PART:
                    cold.append(mapped)
    if cold:
        threading.Thread(target=_run, args=[cold], name="prefetch", daemon=True).start()


def _run(cold: list[list[Area]]) -> None:
    with contextlib.suppress(OSError):
        for mapped in cold:
            residency.want_huge_pages(mapped)
            with open(mapped[0].path, "rb", buffering=0) as file:
                read_ahead(file.fileno(), _stretches(mapped))


def _stretches(mapped: list[Area]) -> list[Stretch]:
    return [(area.offset, area.high - area.low) for area in mapped]


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
