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
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from edgeinfer.runtime.llama.mappings import Range, Untouched
from edgeinfer.snapshots import linux

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
    """Yield address and length of what is not zeros; release blocks of zeros."""
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


PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class Hashing:
    """Hash a file in the background as far as it is written; leaving stops the threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pieces: list[Future[bytes]] = []
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "hash")

    def __enter__(self) -> Hashing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def written(self, size: int) -> None:
        """Hash up to `size` bytes, which will not change any more."""
        while (len(self._pieces) + 1) * PIECE_BYTES <= size:
            self._begin(PIECE_BYTES)

    def finish(self, size: int) -> str:
        """Return the digest of the file, now `size` bytes long."""
        self.written(size)
        if size % PIECE_BYTES or not self._pieces:
            self._begin(size % PIECE_BYTES)
        return hashlib.sha256(b"".join(piece.result() for piece in self._pieces)).hexdigest()

    def _begin(self, length: int) -> None:
        self._pieces.append(self._pool.submit(_hash, self._fd, len(self._pieces) * PIECE_BYTES, length))


def digest(path: Path) -> str:
    """Digest a whole file."""
    with open(path, "rb") as file, Hashing(file.fileno()) as hashing:
        return hashing.finish(os.fstat(file.fileno()).st_size)


def _hash(fd: int, offset: int, length: int) -> bytes:
    found, into = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    end = offset + length
    while offset < end:
        n = os.preadv(fd, [into[: min(_READ_BYTES, end - offset)]], offset)
        if not n:
            raise OSError(f"the file ends {end - offset} bytes early")
        found.update(into[:n])
        offset += n
    return found.digest()
