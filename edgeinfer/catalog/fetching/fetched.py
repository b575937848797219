"""A complete file of a source, not yet verified."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Fetched(msgspec.Struct, kw_only=True):
    """One complete file. `ours` is false for a file imported in place.

    `sha256` is what its source promises ("": nothing); whoever hashes it fills in `found_sha256`.
    `pinned` is false for files of this machine, which may change between two imports.
    `checkpoint` marks files, or the folder, that are to be converted.
    """

    path: Path
    file_name: str
    sha256: str = ""
    ours: bool = True
    pinned: bool = True
    index: int = 0
    n_files: int = 1
    found_sha256: str = ""
    checkpoint: bool = False

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size
