"""Writing files that are whole or not there, and saying clearly when there is no room."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.catalog.progress import Job
from edgeinfer.errors import DiskFullError
from edgeinfer.units import format_bytes

CHUNK_BYTES = 4 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def room_errors(place: Path) -> Iterator[None]:
    """Turn "no space left" (or a quota, or a file-size limit) under the block into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DiskFullError(
            f"no room left on the disk of {place}: {error.strerror}; what was fetched is kept"
        ) from error


def need_room(folder: Path, n_bytes: int, what: str) -> None:
    """Raise DiskFullError when `folder`'s disk has less than `n_bytes` free."""
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if free < n_bytes:
        raise DiskFullError(
            f"{what} needs {format_bytes(n_bytes)} on the disk of {folder}; {format_bytes(free)} are free"
        )


def sha256_of(path: Path, job: Job) -> str:
    """The SHA-256 of the file at `path`, with progress."""
    hasher = hashlib.sha256()
    done = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            job.at(done)
    return hasher.hexdigest()


def flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename after it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with room_errors(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)
