"""Backend libraries as files: where they lie, and which llama.cpp each was built for.

Beside `libggml-NAME.so` lies `libggml-NAME.json`, which says what it was built from. ggml itself
compares only a number of its interface, and two builds of one number may lay out their structures
otherwise; a library whose build is not that of the llama.cpp in use is never opened. Neither is one
that somebody else may write to. Nothing here loads anything, and nothing here asks llama.cpp.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from pathlib import Path

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.platform import paths

#: Every backend there is a name for, those to prefer first: a vendor's own before Vulkan, which shows
#: the same devices again.
NAMES = ("cuda", "rocm", "sycl", "vulkan")
#: What ggml calls a backend where we call it by its vendor's name.
_GGML = {"rocm": "hip"}


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What a library was built from. `commit` is "unknown" where it was built without git."""

    binding: str
    ggml: str
    commit: str
    machine: str

    def __str__(self) -> str:
        return f"llama-cpp-python {self.binding}, ggml {self.ggml} ({self.commit}), {self.machine}"

    def fits(self, other: Build) -> bool:
        """Whether a library of this build may be loaded into the other."""
        if "unknown" not in (self.commit, other.commit) and self.commit != other.commit:
            return False
        mine = (self.binding, self.ggml, self.machine)
        return mine == (other.binding, other.ggml, other.machine)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file beside a library. `architectures` are a CUDA build's, as CMake names them."""

    name: str
    build: Build
    sha256: str
    size_bytes: int
    architectures: tuple[str, ...] = ()


class BackendFile(msgspec.Struct, frozen=True, kw_only=True):
    """A backend library that is here. `problem` says why it can't be used, "" for one that may be.

    `added` ones lie in the user's data folder, the others came with the program.
    """

    name: str
    path: str
    added: bool
    facts: Facts | None = None
    problem: str = ""


def this_machine() -> str:
    """The machine as a build names it: "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"


def file_name(name: str) -> str:
    """`vulkan` → `libggml-vulkan.so`. Raises UsageError for a name that no backend has."""
    if name not in NAMES:
        raise UsageError(f"there is no backend {name!r}: one of {', '.join(NAMES)}")
    return f"libggml-{_GGML.get(name, name)}.so"


def facts_path(library: Path) -> Path:
    """The JSON file beside a library."""
    return library.with_suffix(".json")


def shipped_dir() -> Path:
    """Where the program's own lie; not with the CPU variants, a folder that ggml loads all of."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "backends" if frozen else Path(sys.prefix) / "lib/edgeinfer/backends"


def added_dir() -> Path:
    """Where a user's own lie: `edgeinfer backend` names the folder."""
    return paths.data_dir() / "backends"


def available() -> tuple[BackendFile, ...]:
    """The libraries that are here, one a backend, those to prefer first.

    A user's own goes before the program's, and one that can be used before one that can't.
    """
    found = (find(name) for name in NAMES)
    return tuple(file for file in found if file)


def find(name: str, build: Build | None = None) -> BackendFile | None:
    """One backend's library, one that fits `build` if any does, or None. Raises UsageError."""
    library = file_name(name)
    places = ((added_dir() / library, True), (shipped_dir() / library, False))
    # not Path.is_file, which raises for a folder that is closed to this user
    files = [read(name, path, added=added) for path, added in places if os.path.isfile(path)]
    usable = [file for file in files if not (misfit(file, build) if build else file.problem)]
    return next(iter(usable or files), None)


def read(name: str, path: Path, *, added: bool) -> BackendFile:
    """One library with what its JSON file says; the file itself is only measured."""
    facts, problem = None, _unsafe(path)
    if not problem:
        try:
            facts = msgspec.json.decode(facts_path(path).read_bytes(), type=Facts)
        except (OSError, msgspec.MsgspecError):
            problem = f"{facts_path(path).name} does not say which llama.cpp it was built for"
    if facts and (facts.name != name or facts.size_bytes != path.stat().st_size):
        problem = f"{path.name} is not the file that {facts_path(path).name} describes"
    return BackendFile(name=name, path=str(path), added=added, facts=facts, problem=problem)


def misfit(file: BackendFile, build: Build) -> str:
    """Why a library can't be loaded into a llama.cpp of `build`; "" where it can."""
    if file.problem or file.facts is None:
        return file.problem
    if file.facts.build.fits(build):
        return ""
    return f"{os.path.basename(file.path)} was built for {file.facts.build}; this is {build}"


def _unsafe(path: Path) -> str:
    """Why nobody should run the code of `path`; "" for a file that only this user or root may write."""
    for place in (path, path.parent):
        info = place.stat()
        if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
            return f"somebody else may write to {place}"
    return ""
