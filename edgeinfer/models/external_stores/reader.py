"""Read other programs' stores with limits, only inside the store, and without writing.

Nothing here opens a file for writing, takes a lock or creates a folder. A path from inside a store is
used only if it leads to an ordinary file inside the store. Hashed files are recorded in the cache by
path; size, modification time and inode must be unchanged.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import ClassVar

import msgspec

from edgeinfer.errors import ChecksumError
from edgeinfer.platform.disk import CacheTable, sha256_of


class ExternalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file. `path` has no links; `sha256` is the digest in its name, or ""."""

    path: str
    size_bytes: int
    sha256: str = ""


class ExternalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another program. `name` is its model reference.

    `problem` says why it cannot be used and `fix` how to solve that. `layers` are Ollama's further
    files by kind (`template`, `params`, `system`, …). `projectors` may encode pictures for it.
    """

    name: str
    store: str
    files: tuple[ExternalFile, ...] = ()
    modified_s: float = 0.0
    problem: str = ""
    fix: str = ""
    layers: Mapping[str, str] = {}
    projectors: tuple[ExternalFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


#: Progress callback: (bytes read, total bytes).
OnRead = Callable[[int, int], None]


class _Seen(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    inode: int
    sha256: str


#: Verified files by path.
_VERIFIED = CacheTable("verified.json", dict[str, _Seen])


def verify(file: ExternalFile, progress: OnRead) -> None:
    """Compare a file with the digest in its name, once per file. Raises ChecksumError, OSError."""
    if not file.sha256:
        return
    now = _look(file)
    if _VERIFIED.read().get(file.path) == now:
        return
    digest = sha256_of(Path(file.path), lambda done: progress(done, now.size_bytes))
    if digest != file.sha256:
        raise ChecksumError(f"{file.path} has SHA-256 {digest}, not {file.sha256} as its name says")
    if _look(file) == now:
        _VERIFIED.put(file.path, now)


def _look(file: ExternalFile) -> _Seen:
    info = os.stat(file.path)
    return _Seen(info.st_size, info.st_mtime_ns, info.st_ino, file.sha256)


#: Most folders and files that a search of one store visits; real stores have tens of models.
MAX_ENTRIES = 20_000
#: Longest manifest, template or settings file (bytes) that is read.
MAX_TEXT_BYTES = 1 << 20


class UnusableError(Exception):
    """Part of a store that cannot be used; a search reports it as a model's problem."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ExternalStore(ABC):
    """A program's models. Their names begin with `prefix`. `fix` is the hint for an unusable model,
    whose name replaces "{}".
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    fix: ClassVar[str]

    @abstractmethod
    def roots(self, environment: Mapping[str, str]) -> list[Path]:
        """Return the folders that may hold the program's models; they need not exist."""

    @abstractmethod
    def search(self, root: Path) -> Iterator[ExternalModel]:
        """Yield every model below the real path `root`. Raises UnusableError if it is not readable."""

    def unusable(self, name: str, error: UnusableError) -> ExternalModel:
        """Return an unusable model, with the error's hint or the store's `fix`."""
        fix = error.hint or self.fix.replace("{}", name.removeprefix(self.prefix))
        return ExternalModel(name=name, store=self.name, problem=error.message, fix=fix)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder by name; empty if absent. Raises UnusableError if it is not readable."""
    try:
        with os.scandir(folder) as scan:
            return sorted(islice(scan, MAX_ENTRIES), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnusableError(f"{folder} cannot be listed: {_reason(error)}") from error


def folders(folder: Path) -> list[Path]:
    """List the visible folders in a folder. Raises what `entries` raises."""
    return [Path(e.path) for e in entries(folder) if not e.name.startswith(".") and _is_folder(e)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def ggufs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield `….gguf` files up to `depth` folders deep; links to folders are not followed."""
    for entry in entries(folder):
        if entry.name.startswith("."):
            continue
        if entry.name.lower().endswith(".gguf"):
            yield Path(entry.path)
        elif depth and entry.is_dir(follow_symlinks=False):
            yield from ggufs(Path(entry.path), depth - 1)


def resolve_inside(path: Path, store: Path) -> tuple[str, os.stat_result]:
    """Return the ordinary file that `path` is or links to, and its status. `store` is a real path.

    Raises UnusableError if it does not exist, is not a readable file, or is outside `store`.
    """
    real = os.path.realpath(path)
    try:
        info = os.stat(real)
    except (OSError, ValueError) as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "does not exist" if gone else f"can't be read: {_reason(error)}"
        raise UnusableError(f"the file {real} {reason}") from error
    if not real.startswith(f"{store}{os.sep}"):
        hint = f"if you trust that file, use it by its path: {real}"
        raise UnusableError(f"{path} is a link to {real}, which is outside {store}", hint)
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "a device or socket"
        raise UnusableError(f"{real} is {kind}, not a file")
    if not os.access(real, os.R_OK):
        hint = "let its owner or an administrator allow it"
        raise UnusableError(f"this user may not read {real}", hint)
    return real, info


def small_file(path: Path, store: Path) -> bytes:
    """Read a manifest or another short file whole. Raises UnusableError."""
    real, info = resolve_inside(path, store)
    if info.st_size > MAX_TEXT_BYTES:
        raise UnusableError(f"{real} has {info.st_size} bytes; at most {MAX_TEXT_BYTES} are read")
    try:
        with open(real, "rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UnusableError(f"{real} can't be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
