"""Remember which files of other programs were read whole and had the SHA-256 that their names promise.

One file of ours in the cache, by path; size, modification time and inode must be what they were.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgeinfer import paths
from edgeinfer.catalog.found.model import FoundFile
from edgeinfer.disk import sha256_of, write_whole
from edgeinfer.errors import ChecksumError, DiskFullError

_MEMORY = "verified.json"
#: The oldest are forgotten beyond so many files.
_KEPT = 1000

#: (bytes read, bytes in all), for a person who waits
OnRead = Callable[[int, int], None]


class _Seen(msgspec.Struct, frozen=True):
    """A file as it was when its digest was computed."""

    size_bytes: int
    mtime_ns: int
    inode: int
    sha256: str


def verify(file: FoundFile, heard: OnRead) -> None:
    """Compare a file with the digest in its name, once. Raises ChecksumError, OSError."""
    if not file.sha256:
        return
    known = _read()
    now = _look(file)
    if known.get(file.path) == now:
        return
    found = sha256_of(Path(file.path), lambda done: heard(done, now.size_bytes))
    if found != file.sha256:
        raise ChecksumError(f"{file.path} has SHA-256 {found}, not {file.sha256} as its name says")
    if _look(file) == now:
        _write({**{path: seen for path, seen in known.items() if path != file.path}, file.path: now})


def _look(file: FoundFile) -> _Seen:
    info = os.stat(file.path)
    return _Seen(info.st_size, info.st_mtime_ns, info.st_ino, file.sha256)


def _read() -> dict[str, _Seen]:
    """What is remembered; nothing when it can't be read: it costs time only."""
    try:
        return msgspec.json.decode((paths.cache_dir() / _MEMORY).read_bytes(), type=dict[str, _Seen])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(known: dict[str, _Seen]) -> None:
    latest = dict(list(known.items())[-_KEPT:])
    with contextlib.suppress(OSError, DiskFullError):
        paths.cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(paths.cache_dir() / _MEMORY, msgspec.json.encode(latest))
