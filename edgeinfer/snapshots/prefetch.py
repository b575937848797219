"""Reading ahead when the page cache is cold: the first decode touches all weights, page by page, in the order of the file.

A thread of the resumed process looks at a few pages; when some are not cached it asks the kernel for everything that is mapped
in large pieces, in order of the file, which reads at the disk's speed. When they are cached it does nothing: mapping them in
advance (MADV_POPULATE_READ) was measured to cost as much as the faults it saves (docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import os
import threading

from edgeinfer.snapshots import memory

_PROBES = 64
_STEP_BYTES = 8 << 20
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05

Stretch = tuple[str, int, int]


def start() -> threading.Thread:
    """Look, and read ahead if need be, in the background."""
    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    return thread


def run() -> int:
    """Read ahead what is not cached; the bytes asked for."""
    asked = 0
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        for path, stretches in _by_file(large_stretches()).items():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if missing_part(fd, stretches) > _COLD_PART:
                    asked += _read_ahead(fd, stretches)
            finally:
                os.close(fd)
    return asked


def large_stretches() -> list[Stretch]:
    """Path, offset and length of every large file mapping of this process."""
    return [
        (area.path, area.offset, area.high - area.low)
        for area in memory.areas()
        if area.path.startswith("/") and area.high - area.low >= memory.LARGE_BYTES
    ]


def _by_file(stretches: list[Stretch]) -> dict[str, list[Stretch]]:
    found: dict[str, list[Stretch]] = {}
    for stretch in sorted(stretches):
        found.setdefault(stretch[0], []).append(stretch)
    return found


def missing_part(fd: int, stretches: list[Stretch]) -> float:
    """How much of the stretches is not in the page cache, 0 to 1, by a sample."""
    page = bytearray(1)
    missing = probes = 0
    total = sum(length for _, _, length in stretches)
    for _, offset, length in stretches:
        count = max(1, _PROBES * length // total)
        for n in range(count):
            probes += 1
            try:
                os.preadv(fd, [page], offset + length * n // count, os.RWF_NOWAIT)
            except BlockingIOError:
                missing += 1
    return missing / probes


def _read_ahead(fd: int, stretches: list[Stretch]) -> int:
    asked = 0
    for _, offset, length in stretches:
        for at in range(offset, offset + length, _STEP_BYTES):
            step = min(_STEP_BYTES, offset + length - at)
            os.posix_fadvise(fd, at, step, os.POSIX_FADV_WILLNEED)
            asked += step
    return asked
