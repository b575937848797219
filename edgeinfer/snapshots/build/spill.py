"""Move llama.cpp's buffers into a file before the dump, mapped copy-on-write instead.

Nothing runs on them while the engine is parked, so the process can do this itself, which Python's heap
would not allow (docs/decisions/040-bake-the-images.md). It writes megabytes at a time, and each byte to
an offset that equals its address modulo the size of a huge page. That is the point: where the file
system has large folios the page cache then holds huge pages, which a resume maps 512 pages at a fault
and reads without missing the TLB. CRIU writes page by page (decision 043 has the figures). Zeros, which
are what llama.cpp leaves in an empty KV cache, are given back instead; memory that was never touched is
not even looked at, which takes 0.45 s a GiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from edgeinfer.runtime.llama.mappings import Range, Untouched
from edgeinfer.snapshots import linux
from edgeinfer.snapshots.build.digests import Hashing

#: Compared with zeros, and given back, in blocks of this size.
BLOCK_BYTES = 256 << 10
#: Written in stretches of at most this size, aligned to it.
STRETCH_BYTES = 4 << 20
HUGE_PAGE_BYTES = 2 << 20


class Spilled(NamedTuple):
    """The file's size, what of it was written, both in bytes, and its digest with holes."""

    size: int
    written: int
    digest: str


def spill(buffers: list[Range], path: str, progress: Callable[[float], None]) -> Spilled:
    """Move these ranges (lowest, highest address of whole pages) into `path`, mapped there.

    Nothing may write to them meanwhile. Progress from 0 to 1. No file without buffers. Raises OSError.
    """
    if not buffers:
        return Spilled(0, 0, "")
    size = written = 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with Hashing(fd) as hashing:
            for at, length in _stretches(buffers, progress):
                hole = (at - size) % HUGE_PAGE_BYTES
                _write_all(
                    fd, memoryview((ctypes.c_char * length).from_address(at)).cast("B"), size + hole
                )
                linux.map_private(at, length, fd, size + hole)
                linux.begin_writing(fd, size + hole, length)
                size += hole + length
                written += length
                hashing.written(size)
            return Spilled(size, written, hashing.finish(size))
    finally:
        os.close(fd)


def _stretches(buffers: list[Range], progress: Callable[[float], None]) -> Iterator[tuple[int, int]]:
    """Address and length of what is not zeros; blocks of zeros are given back."""
    zeros = ctypes.create_string_buffer(BLOCK_BYTES)
    total, seen = sum(high - low for low, high in buffers), 0
    with contextlib.closing(Untouched()) as untouched:
        for low, high in buffers:
            begin = at = low
            while at < high:
                end = min(at - at % BLOCK_BYTES + BLOCK_BYTES, high)
                is_untouched = untouched.holds(at, end)
                empty = is_untouched or linux.equal(at, zeros, end - at)
                if at > begin and (empty or at % STRETCH_BYTES == 0):
                    yield begin, at - begin
                    begin = at
                    progress((seen + at - low) / total)
                if empty:
                    begin = end
                if empty and not is_untouched:
                    linux.forget_pages(at, end - at)
                at = end
            if begin < high:
                yield begin, high - begin
            seen += high - low
    progress(1.0)


def _write_all(fd: int, content: memoryview, offset: int) -> None:
    while content:
        done = os.pwrite(fd, content, offset)
        content, offset = content[done:], offset + done
