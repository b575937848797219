"""The page cache: how much of a file is in it, and reading files into it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

_BLOCK_BYTES = 4 << 20
_PROBES = 64
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05
#: Concurrent reads: enough to keep a fast disk busy, and still nearly sequential for a slow one.
_READERS = 4


def cached_bytes(path: Path) -> int:
    """Return the bytes of a file that are in the page cache, in whole pages.

    The kernel reports a file that this user may not write as wholly cached.
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


def is_cold(path: str | Path) -> bool:
    """Return whether a sample of a file is not cached. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # or each probe reads more
        # at random places: a page that was asked for is read, and the next sample would find it
        offsets = [random.randrange(size) for _ in range(_PROBES)] if size else []
        missing = sum(not is_cached(file.fileno(), offset) for offset in offsets)
    return missing > _PROBES * _COLD_PART


def is_cached(fd: int, offset: int) -> bool:
    """Return whether the page of an open file at `offset` is cached."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def read_in(files: Sequence[Path], progress: Callable[[int], None]) -> int:
    """Read files into the page cache, in order, each from its start; return the bytes read.

    `progress` gets the bytes read so far, in the calling thread, and may raise to stop. Raises OSError.
    """
    blocks = [(path, at) for path in files for at in range(0, path.stat().st_size, _BLOCK_BYTES)]
    done = 0
    with ThreadPoolExecutor(_READERS, "preload") as pool:
        try:
            for read_bytes in pool.map(_read_block, *zip(*blocks, strict=True)):
                done += read_bytes
                progress(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _read_block(path: Path, start: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return len(os.pread(descriptor, _BLOCK_BYTES, start))
    finally:
        os.close(descriptor)
