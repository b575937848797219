"""Digest a snapshot's file as the SHA-256 of its pieces' SHA-256s, on all cores."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

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
        """The first `size` bytes will not change any more."""
        while (len(self._pieces) + 1) * PIECE_BYTES <= size:
            self._begin(PIECE_BYTES)

    def finish(self, size: int) -> str:
        """The whole file is `size` bytes long; its digest."""
        self.written(size)
        if size % PIECE_BYTES or not self._pieces:
            self._begin(size % PIECE_BYTES)
        return hashlib.sha256(b"".join(piece.result() for piece in self._pieces)).hexdigest()

    def _begin(self, length: int) -> None:
        self._pieces.append(self._pool.submit(_hash, self._fd, len(self._pieces) * PIECE_BYTES, length))


def digest(path: Path) -> str:
    """A whole file's."""
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
