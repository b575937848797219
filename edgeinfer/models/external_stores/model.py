"""A model in another program's store, as a search finds it, and the digests of its files.

Files that were read whole are remembered in the cache, by path; size, modification time and inode must
be what they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgeinfer.errors import ChecksumError
from edgeinfer.system.cache_files import CacheTable
from edgeinfer.system.disk import sha256_of


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """One GGUF file. `path` is the file itself, no link; `sha256` is what its name promises, or ""."""

    path: str
    size_bytes: int
    sha256: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another program. `name` is what a person types to use it.

    `problem` says why it can't be used and `fix` what to do about it. `layers` are Ollama's further
    files by kind (`template`, `params`, `system`, …).
    """

    name: str
    store: str
    files: tuple[FoundFile, ...] = ()
    modified_s: float = 0.0
    problem: str = ""
    fix: str = ""
    layers: Mapping[str, str] = {}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


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
