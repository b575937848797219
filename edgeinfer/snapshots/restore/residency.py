"""The memory of a resumed process: what it maps, where llama.cpp's buffers are, and giving them back.

A buffer of llama.cpp is one large allocation. glibc takes such a one from the kernel by itself and
writes its size in front: `buffers` finds them by that, exactly, so nothing of Python's is ever among
them. Where that is not found (another libc, another allocator) there are none, and nothing is given
back: the kernel still can, it only takes longer to want to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from io import FileIO

from edgeinfer.runtime.llama.mappings import (
    DONTNEED,
    HUGEPAGE,
    LARGE_BYTES,
    PAGEOUT,
    Area,
    Range,
    advise,
    areas,
)

PAGE = mmap.PAGESIZE
#: Memory is looked at and given back in windows of this size.
WINDOW_BYTES = 2 << 20
#: posix_memalign with 64, as ggml calls it, puts the chunk's header 48 bytes into its first page.
_LEAD = 48
_IS_MMAPPED = 2
_FLAGS = 7
_PRESENT = 1 << 63
_SWAPPED = 1 << 62
_OF_FILE = 1 << 61


def large(kind: str) -> list[Area]:
    """Large mappings of files, `kind` "p" private or "s" shared, in the order of their addresses."""
    return [
        area
        for area in areas()
        if area.path.startswith("/")
        and area.permissions.endswith(kind)
        and area.high - area.low >= LARGE_BYTES
    ]


def buffers() -> list[Range]:
    """Find the whole pages of every large allocation in anonymous memory."""
    found = []
    for area in areas():
        if area.path or area.permissions != "rw-p":
            continue
        at = area.low
        while at + LARGE_BYTES <= area.high:
            size = _chunk_bytes(at, area.high)
            if size:
                found.append(Range(at + PAGE, at + size - PAGE))
            at += size or PAGE
    return found


def _chunk_bytes(at: int, limit: int) -> int:
    """The size of the allocation whose first page begins here, or 0."""
    lead, size = (ctypes.c_uint64 * 2).from_address(at + _LEAD)
    total = (size & ~_FLAGS) + _LEAD
    is_one = lead == _LEAD and size & _FLAGS == _IS_MMAPPED and total % PAGE == 0
    return total if is_one and LARGE_BYTES <= total <= limit - at else 0


def give_back(ranges: list[Range]) -> int:
    """Drop these ranges' clean file pages; page out the windows that were written.

    Returns the bytes dropped from this process; they stay in the page cache. Nothing may write to the
    ranges meanwhile.
    """
    clean: list[Range] = []
    own: list[Range] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for low, high in ranges:
            for at in range(low, high, WINDOW_BYTES):
                end = min(at + WINDOW_BYTES, high)
                written = any(
                    e & _SWAPPED or (e & _PRESENT and not e & _OF_FILE)
                    for e in _entries(pagemap, at, end)
                )
                (own if written else clean).append(Range(at, end))
    advise(own, PAGEOUT)
    advise(clean, DONTNEED)
    return sum(end - at for at, end in clean)


def give_back_shared() -> None:
    """Drop the pages of large shared file mappings: the model's file."""
    advise((Range(area.low, area.high) for area in large("s")), DONTNEED)


def touched_shared() -> list[Area]:
    """List the touched windows of large shared mappings: weights used as they are, not repacked."""
    found = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for area in large("s"):
            for low in range(area.low, area.high, WINDOW_BYTES):
                high = min(low + WINDOW_BYTES, area.high)
                if any(entry & _PRESENT for entry in _entries(pagemap, low, high)):
                    found.append(area._replace(low=low, high=high, offset=area.offset + low - area.low))
    return found


def _entries(pagemap: FileIO, low: int, high: int) -> memoryview[int]:
    """A number for each page (admin-guide/mm/pagemap in the kernel's documentation)."""
    return memoryview(os.pread(pagemap.fileno(), (high - low) // PAGE * 8, low // PAGE * 8)).cast("Q")


def want_huge_pages(mapped: Iterable[Area]) -> None:
    """Ask for huge pages in the page cache of these mappings, if the file system has them."""
    advise((Range(area.low, area.high) for area in mapped), HUGEPAGE)
