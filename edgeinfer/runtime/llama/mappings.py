"""This process's memory mappings on Linux, and madvise(2) on them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: madvise(2).
NORMAL = 0
DONTNEED = 4
HUGEPAGE = 14
POPULATE_WRITE = 23
#: mmap(2) flags that Python does not define.
_FIXED, _NORESERVE = 0x10, 0x4000
#: Smaller allocations and mappings are ignored.
LARGE_BYTES = 32 << 20


class Range(NamedTuple):
    """Addresses, or offsets in a file, from `low` up to but not including `high`."""

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
            low, high = (int(bound, 16) for bound in parts[0].split("-"))
            yield Area(low, high, parts[1], int(parts[2], 16), parts[5] if len(parts) > 5 else "")


def mapped_weights() -> list[Area]:
    """Return the large shared file mappings, in the order of their addresses."""
    return [
        area
        for area in areas()
        if area.path.startswith("/")
        and area.permissions.endswith("s")
        and area.high - area.low >= LARGE_BYTES
    ]


def advise(ranges: Iterable[Range], advice: int) -> None:
    """Call madvise(2) on each range; a refusal by the kernel is not an error."""
    libc = ctypes.CDLL(None)
    for low, high in ranges:
        libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)


def map_zeros(low: int, high: int) -> None:
    """Replace whole pages of the caller by private, untouched memory.

    If the kernel cannot add the mapping, the pages keep their contents.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    size, offset = ctypes.c_size_t(high - low), ctypes.c_long(0)
    libc.mmap(ctypes.c_void_p(low), size, protection, flags, -1, offset)
