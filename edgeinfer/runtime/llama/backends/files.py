"""Backend libraries as files: where they lie, and which llama.cpp each was built for.

Beside `libggml-NAME.so` lies `libggml-NAME.json`, which describes its build. ggml itself compares only
a number of its interface, and two builds of one number may lay out their structures differently; a
library of another build than the llama.cpp in use is never opened, nor one that another user may write
to. Nothing here loads a library.
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

#: Every backend, preferred ones first: a vendor's own before Vulkan, which shows its devices again.
NAMES = ("cuda", "vulkan")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The build of a library. `commit` is "unknown" if it was built without git."""

    binding: str
    ggml: str
    commit: str
    machine: str

    def __str__(self) -> str:
        return f"llama-cpp-python {self.binding}, ggml {self.ggml} ({self.commit}), {self.machine}"

    def fits(self, other: Build) -> bool:
        if "unknown" not in (self.commit, other.commit) and self.commit != other.commit:
            return False
        mine = (self.binding, self.ggml, self.machine)
        return mine == (other.binding, other.ggml, other.machine)


class LibraryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file beside a library."""

    name: str
    build: Build
    sha256: str
    size_bytes: int


class BackendFile(msgspec.Struct, frozen=True, kw_only=True):
    """A backend library on this machine. `problem` is why it cannot be used, "" for none.

    `added` ones lie in the user's data folder, the others came with the program.
    """

    name: str
    path: str
    added: bool
    facts: LibraryFacts | None = None
    problem: str = ""


def this_machine() -> str:
    """Name the machine as a build does: "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"


def file_name(name: str) -> str:
    """`vulkan` → `libggml-vulkan.so`. Raises UsageError for a name that no backend has."""
    if name not in NAMES:
        raise UsageError(f"there is no backend {name!r}: one of {', '.join(NAMES)}")
    return f"libggml-{name}.so"


def facts_path(library: Path) -> Path:
    return library.with_suffix(".json")


def shipped_dir() -> Path:
    """Return the program's own folder; apart from the CPU variants, whose folder ggml loads whole."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "backends" if frozen else Path(sys.prefix) / "lib/edgeinfer/backends"


def added_dir() -> Path:
    return paths.data_dir() / "backends"


def adding() -> str:
    """Say how to add a library."""
    return f"put libggml-NAME.so and libggml-NAME.json into {added_dir()}"


def available() -> tuple[BackendFile, ...]:
    """List the libraries on this machine, one per backend, preferred ones first.

    The user's own goes before the program's, and a usable one before the others.
    """
    found = (find(name) for name in NAMES)
    return tuple(file for file in found if file)


def find(name: str, build: Build | None = None) -> BackendFile | None:
    """Find one backend's library, one that fits `build` if any does. Raises UsageError."""
    library = file_name(name)
    places = ((added_dir() / library, True), (shipped_dir() / library, False))
    # not Path.is_file, which raises for a folder that is closed to this user
    files = [read(name, path, added=added) for path, added in places if os.path.isfile(path)]
    usable = [file for file in files if not (misfit(file, build) if build else file.problem)]
    return next(iter(usable or files), None)


def read(name: str, path: Path, *, added: bool) -> BackendFile:
    """Describe one library by its JSON file; the library itself is only measured."""
    facts, problem = None, _unsafe(path)
    if not problem:
        try:
            facts = msgspec.json.decode(facts_path(path).read_bytes(), type=LibraryFacts)
        except (OSError, msgspec.MsgspecError):
            problem = f"{facts_path(path).name} does not say which llama.cpp it was built for"
    if facts and (facts.name != name or facts.size_bytes != path.stat().st_size):
        problem = f"{path.name} is not the file that {facts_path(path).name} describes"
    return BackendFile(name=name, path=str(path), added=added, facts=facts, problem=problem)


def misfit(file: BackendFile, build: Build) -> str:
    """Return why a library cannot be loaded into a llama.cpp of `build`; "" if it can."""
    if file.problem or file.facts is None:
        return file.problem
    if file.facts.build.fits(build):
        return ""
    return f"{os.path.basename(file.path)} was built for {file.facts.build}; this is {build}"


def _unsafe(path: Path) -> str:
    """Return why the code of `path` must not run; "" if only this user or root may write it."""
    for place in (path, path.parent):
        info = place.stat()
        if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
            return f"another user may write to {place}"
    return ""
