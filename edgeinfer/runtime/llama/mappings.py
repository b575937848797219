"""This process's memory mappings on Linux, and madvise(2) on them."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: madvise(2).
DONTNEED = 4
HUGEPAGE = 14
PAGEOUT = 21
POPULATE_WRITE = 23
#: mmap(2), which Python does not name.
_FIXED, _NORESERVE = 0x10, 0x4000
#: Smaller allocations and mappings are not worth the trouble.
LARGE_BYTES = 32 << 20
#: /proc/self/pagemap has an entry of so many bytes a page; the least of its highest bits that say the
#: page is somewhere: swapped, and above it present.
_ENTRY_BYTES = 8
_SWAPPED = 1 << 6


class Range(NamedTuple):
    """Addresses from `low` up to `high`, or offsets in a file; `high` is the first that is outside."""

    low: int
    high: int


class Area(NamedTuple):
    """A line of /proc/self/maps. `path` is "" for anonymous memory."""

    low: int
    high: int
    permissions: str
    offset: int
    path: str


def areas() -> Iterator[Area]:
    """Yield this process's mappings, in order."""
    try:
        file = open("/proc/self/maps", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        for line in file:
            parts = line.rstrip("\n").split(None, 5)
            low, high = (int(part, 16) for part in parts[0].split("-"))
            yield Area(low, high, parts[1], int(parts[2], 16), parts[5] if len(parts) > 5 else "")


def advise(ranges: Iterable[Range], advice: int) -> None:
    """Call madvise(2) on each range; advice that is not taken is no error."""
    libc = ctypes.CDLL(None)
    for low, high in ranges:
        libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)


def map_zeros(low: int, high: int) -> None:
    """Replace whole pages of the caller by private memory that was never touched.

    If the kernel has no room for the mapping, they keep their contents.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    size, offset = ctypes.c_size_t(high - low), ctypes.c_long(0)
    libc.mmap(ctypes.c_void_p(low), size, protection, flags, -1, offset)


class Untouched:
    """Tell which anonymous memory was never touched, and so holds zeros and takes no page.

    Covers what is anonymous when this is made; nothing if the kernel does not say.
    """

    def __init__(self) -> None:
        self._anonymous = _joined(_anonymous())
        self._lows = [low for low, _ in self._anonymous]
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def holds(self, low: int, high: int) -> bool:
        """Tell if no page of this range was ever touched."""
        at = bisect.bisect_right(self._lows, low) - 1
        if self._fd < 0 or at < 0 or high > self._anonymous[at].high:
            return False
        first = low // mmap.PAGESIZE
        wanted = (-(-high // mmap.PAGESIZE) - first) * _ENTRY_BYTES
        entries = os.pread(self._fd, wanted, first * _ENTRY_BYTES)
        # the highest byte of an entry is its last; it has a bit for "present" and one for "swapped"
        return len(entries) == wanted and max(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]) < _SWAPPED

    def close(self) -> None:
        """Close the kernel's page map. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _joined(ranges: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for low, high in ranges:
        if joined and joined[-1].high == low:
            low = joined.pop().low
        joined.append(Range(low, high))
    return joined


def _anonymous() -> Iterator[Range]:
    return (
        Range(area.low, area.high) for area in areas() if not area.path and area.permissions == "rw-p"
    )
