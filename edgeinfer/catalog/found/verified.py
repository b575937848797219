"""Remember which files of other programs were read whole and had the SHA-256 that their names promise.

One file of ours in the cache, by path; size, modification time and inode must be what they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgeinfer.catalog.found.model import FoundFile
from edgeinfer.errors import ChecksumError
from edgeinfer.system.cache_files import CacheTable
from edgeinfer.system.disk import sha256_of

#: (bytes read, bytes in all), for a person who waits
OnRead = Callable[[int, int], None]


class _Seen(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    inode: int
    sha256: str


#: By path.
_VERIFIED = CacheTable("verified.json", dict[str, _Seen])


def verify(file: FoundFile, heard: OnRead) -> None:
    """Compare a file with the digest in its name, once. Raises ChecksumError, OSError."""
    if not file.sha256:
        return
    now = _look(file)
    if _VERIFIED.read().get(file.path) == now:
        return
    found = sha256_of(Path(file.path), lambda done: heard(done, now.size_bytes))
    if found != file.sha256:
        raise ChecksumError(f"{file.path} has SHA-256 {found}, not {file.sha256} as its name says")
    if _look(file) == now:
        _VERIFIED.put(file.path, now)


def _look(file: FoundFile) -> _Seen:
    info = os.stat(file.path)
    return _Seen(info.st_size, info.st_mtime_ns, info.st_ino, file.sha256)
