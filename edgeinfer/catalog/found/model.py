"""A model in another program's store, as a search finds it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


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
