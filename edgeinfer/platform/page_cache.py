"""What of files the kernel keeps in memory, and bringing them there. Standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

_BLOCK_BYTES = 4 << 20
#: Reads under way at once: enough to keep a fast disk busy, in order enough for a slow one.
_READERS = 4


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages. 0 for an empty file.

    The kernel says so of files that this user may write; of others it says that all is there.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0
        with closing(mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE)) as view:
            vector = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(view)
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector
            )
            del first  # it holds the view open
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return min(size, sum(page & 1 for page in bytes(vector)) * mmap.PAGESIZE)


def read_in(files: Sequence[Path], progress: Callable[[int], None]) -> int:
    """Read files into the page cache, one after the other, each from its beginning; the bytes read.

    `progress` is told the bytes read so far, from the calling thread, and may raise to end it. Raises
    OSError for a file that cannot be read.
    """
    work = _Reading(files)
    readers = [threading.Thread(target=work.read, name="preload", daemon=True) for _ in range(_READERS)]
    for reader in readers:
        reader.start()
    try:
        while any(reader.is_alive() for reader in readers):
            for reader in readers:
                reader.join(0.02)
            progress(work.done)
    finally:
        work.stop()
        for reader in readers:
            reader.join()
    if work.failure is not None:
        raise work.failure
    progress(work.done)
    return work.done


class _Reading:
    def __init__(self, files: Sequence[Path]) -> None:
        self.done = 0
        self.failure: OSError | None = None
        self._lock = threading.Lock()
        self._blocks = _blocks(files)

    def read(self) -> None:
        """Take blocks until there are none, or one cannot be read."""
        with closing(mmap.mmap(-1, _BLOCK_BYTES)) as scratch:
            try:
                self._read_all(scratch)
            except OSError as error:
                self.failure = self.failure or error
                self.stop()

    def _read_all(self, scratch: mmap.mmap) -> None:
        while block := self._next():
            self._read_block(*block, scratch)

    def stop(self) -> None:
        with self._lock:
            self._blocks = iter(())

    def _next(self) -> tuple[Path, int] | None:
        with self._lock:
            return next(self._blocks, None)

    def _read_block(self, path: Path, start: int, scratch: mmap.mmap) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            got = os.preadv(descriptor, [scratch], start)
        finally:
            os.close(descriptor)
        with self._lock:
            self.done += got


def _blocks(files: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for path in files:
        for start in range(0, path.stat().st_size, _BLOCK_BYTES):
            yield path, start
