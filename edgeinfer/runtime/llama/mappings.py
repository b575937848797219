"""Memory mappings of this process on Linux: list them, advise the kernel, release pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Advice for madvise(2), from Linux's mman.h.
NORMAL = 0
DONTNEED = 4
HUGEPAGE = 14
POPULATE_WRITE = 23
#: Flags of mmap(2) that Python does not define.
_FIXED, _NORESERVE = 0x10, 0x4000
#: A file that is mapped shared counts as weights if its mapping has at least this size (bytes).
LARGE_BYTES = 32 << 20


class Range(NamedTuple):
    """The addresses, or offsets in a file, [low, high)."""

    low: int
    high: int


class Area(NamedTuple):
    """A mapping, from a line of /proc/self/maps. `path` is "" for anonymous memory."""

    low: int
    high: int
    permissions: str
    offset: int
    path: str


def areas() -> Iterator[Area]:
    """Yield this process's mappings by address; none without /proc."""
    try:
        file = open("/proc/self/maps", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        for line in file:
            parts = line.rstrip("\n").split(None, 5)
            low, high = (int(bound, 16) for bound in parts[0].split("-"))
            yield Area(low, high, parts[1], int(parts[2], 16), parts[5] if len(parts) > 5 else "")


def mapped_weights() -> list[Area]:
    """Return the mappings of weights, by address: large files, mapped shared."""
    return [
        area
        for area in areas()
        if area.path.startswith("/")
        and area.permissions.endswith("s")
        and area.high - area.low >= LARGE_BYTES
    ]


def advise(ranges: Iterable[Range], advice: int) -> None:
    """Call madvise(2) on each range. Failures are ignored."""
    libc = ctypes.CDLL(None)
    for low, high in ranges:
        libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)


def map_zeros(low: int, high: int) -> None:
    """Replace the pages [low, high) by zeros that take no memory; on failure they stay as they are."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    size, offset = ctypes.c_size_t(high - low), ctypes.c_long(0)
    libc.mmap(ctypes.c_void_p(low), size, protection, flags, -1, offset)
