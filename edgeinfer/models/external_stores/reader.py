"""Read other programs' model stores safely: read-only, with limits, and never outside the store.

A path from inside a store is used only if it leads to a regular file inside that store. A file's digest
is computed once, and again if size, mtime or inode change.
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
    """A GGUF file. `path` has no symlinks; `sha256` is the digest in its name, "" for none."""

    path: str
    size_bytes: int
    sha256: str = ""


class ExternalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another program (`store`). `name` is its name in edgeinfer.

    If the model cannot be used, `problem` says why and `fix` what to do; otherwise both are "".
    `modified_s` is Unix time. `layers` maps the kinds of Ollama's further files (`template`, `params`,
    `system`, …) to their paths. One of `projectors` may fit the model.
    """

    name: str
    store: str
    files: tuple[ExternalFile, ...] = ()
    modified_s: float = 0.0
    problem: str = ""
    fix: str = ""
    layers: Mapping[str, str] = {}
    projectors: tuple[ExternalFile, ...] = ()
    other_names: ClassVar[tuple[str, ...]] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


class _Seen(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    inode: int
    sha256: str


#: Path of a file in another program's store → state of the file when its SHA-256 was last computed, and
#: matched the digest in its name.
_VERIFIED = CacheTable("verified.json", dict[str, _Seen])


def verify(file: ExternalFile, progress: Callable[[float], None]) -> None:
    """Compare a file's SHA-256 with the digest in its name. Raises ChecksumError, OSError.

    A file that was verified before and has not changed is not hashed again. `progress` gets the
    fraction that was read, 0 to 1.
    """
    if not file.sha256:
        return
    now = _stamp_of(file)
    if _VERIFIED.read().get(file.path) == now:
        return
    digest = sha256_of(Path(file.path), lambda done: progress(done / now.size_bytes))
    if digest != file.sha256:
        raise ChecksumError(f"{file.path} has SHA-256 {digest}, but its name says {file.sha256}")
    if _stamp_of(file) == now:
        _VERIFIED.put(file.path, now)


def _stamp_of(file: ExternalFile) -> _Seen:
    info = os.stat(file.path)
    return _Seen(info.st_size, info.st_mtime_ns, info.st_ino, file.sha256)


#: Maximum number of entries of a folder that are read; real stores have some dozens.
MAX_ENTRIES = 20_000
#: Longest manifest, template or settings file (bytes).
MAX_TEXT_BYTES = 1 << 20


class UnusableError(Exception):
    """A model is unusable, or a folder is unreadable. A search then continues with the next one."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ExternalStore(ABC):
    """The model store of another program, `name`. In edgeinfer, its models' names begin with `prefix`.

    `fix` is the hint for an unusable model. In it, "{}" stands for the model's name without `prefix`.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    fix: ClassVar[str]

    @abstractmethod
    def roots(self, environment: Mapping[str, str]) -> list[Path]:
        """Return the folders that may hold the program's models; they need not exist."""

    @abstractmethod
    def search(self, root: Path) -> Iterator[ExternalModel]:
        """Yield every model below `root`, a path without symlinks. Raises UnusableError."""

    def unusable(self, name: str, error: UnusableError) -> ExternalModel:
        """Return the unusable model `name` with the message and the hint of `error`.

        If the error has no hint, that of the store (`fix`) is used.
        """
        fix = error.hint or self.fix.replace("{}", name.removeprefix(self.prefix))
        return ExternalModel(name=name, store=self.name, problem=error.message, fix=fix)


def entries(folder: Path) -> list[Path]:
    """List the paths in a folder in order of name, without hidden ones; [] if the folder is missing.

    Raises UnusableError if the folder cannot be read.
    """
    try:
        with os.scandir(folder) as scan:
            names = sorted(entry.name for entry in islice(scan, MAX_ENTRIES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnusableError(f"{folder} cannot be listed: {_reason(error)}") from error
    return [folder / name for name in names if not name.startswith(".")]


def folders(folder: Path) -> list[Path]:
    """List the folders in a folder, without hidden ones. Raises UnusableError if unreadable."""
    return [path for path in entries(folder) if os.path.isdir(path)]


def ggufs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield `.gguf` files up to `depth` folders deep. Links to folders are not followed.

    Raises UnusableError if a folder cannot be read.
    """
    for path in entries(folder):
        if path.name.lower().endswith(".gguf"):
            yield path
        elif depth and os.path.isdir(path) and not path.is_symlink():
            yield from ggufs(path, depth - 1)


def resolve_inside(path: Path, store: Path) -> tuple[str, os.stat_result]:
    """Return the real path and the status of a file; `store` is a path without symlinks.

    Raises UnusableError if the file is missing, not regular, not readable, or outside `store`.
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
        hint = "let the owner of the file or an administrator allow that"
        raise UnusableError(f"this user may not read {real}", hint)
    return real, info


def small_file(path: Path, store: Path) -> bytes:
    """Return the content of a file in `store`. Raises UnusableError, also above MAX_TEXT_BYTES."""
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
