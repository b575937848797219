"""GPU backends of llama.cpp: their libraries, the build each is for, its devices, what a launch wants.

Beside `libggml-NAME.so` lies `libggml-NAME.json`, which describes its build. ggml itself compares only
a number of its interface, and two builds of one number may lay out their structures differently; a
library of another build than the llama.cpp in use is never opened, nor one that another user may write
to. Nothing here loads a library into this process.
"""

from __future__ import annotations

import os
import platform
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.platform import machine, paths
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.memory_plan import Room
from edgeinfer.units import format_bytes

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
    """The JSON file next to a library."""

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
    """Return a backend's file name, `libggml-vulkan.so`. Raises UsageError for an unknown one."""
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
    files = (find(name) for name in NAMES)
    return tuple(file for file in files if file)


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
    for location in (path, path.parent):
        info = location.stat()
        if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
            return f"another user may write to {location}"
    return ""


#: "gpu" has memory of its own, "integrated" shares the machine's, "software" is a CPU that plays a GPU.
Kind = Literal["gpu", "integrated", "software", "accelerator"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a loaded backend, as it was when probed.

    `name` is llama.cpp's ("Vulkan0"), `pointer` its ggml_backend_dev_t, valid only in this process.
    `id` is the PCI address, "" for none.
    Memory in bytes, of the whole device; a driver without that figure reports all of it as free.
    """

    name: str
    description: str
    kind: Kind
    backend: str
    id: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    pointer: int = 0


class LoadedBackend(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """A backend library that is registered in this process, which cannot be dumped from now on.

    `devices` has at least one. `warning` names a missing dependency, "" for none.
    """

    file: BackendFile
    devices: tuple[Device, ...]
    warning: str = ""


class MissingBackend(msgspec.Struct, frozen=True, kw_only=True, tag="not-loaded"):
    """Reason (one line) why a backend gives no device; `fix`: the command that helps, or "".

    `absent` if nothing is wrong: the machine has no such device, or no such library was added.
    """

    name: str
    reason: str
    fix: str = ""
    absent: bool = False


def device_line(device: Device) -> str:
    kind = {"gpu": "", "integrated": ", integrated", "software": ", in software"}.get(device.kind, "")
    memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
    return f"{device.name}: {device.description}{kind}, {memory}"


class OffloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` is `--gpu-layers`; the rest is `[gpu]` of the configuration.

    `devices` are llama.cpp's names of those to use, none for every one but software devices.
    """

    layers: int | str = "auto"
    devices: tuple[str, ...] = ()

    @property
    def is_explicit(self) -> bool:
        """True if layers on a device were requested, so that a failure is reported."""
        return self.layers not in ("auto", "none", 0)

    def opens_backends(self) -> bool:
        """Return whether backends are opened: without a request only if there may be a GPU."""
        named = self.is_explicit or bool(self.devices)
        return self.layers not in ("none", 0) and (named or machine.has_gpu())

    def choose(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Choose the named devices, else discrete GPUs, else integrated ones, which share the machine's
        memory, else software ones if layers were requested.
        """
        if self.devices:
            return tuple(device for device in devices if device.name in self.devices)
        for kind in ("gpu", "integrated"):
            if chosen := tuple(device for device in devices if device.kind == kind):
                return chosen
        return tuple(devices) if self.is_explicit else ()

    def room(self, device: Device) -> Room:
        """Return how much of a device's memory may be used."""
        free = device.free_bytes
        return Room(name=device.name, free_bytes=free)


_HELPER = "edgeinfer.runtime.llama.helpers.backend_probe"
#: How long (s) a probe may take; a slower driver is stuck.
_PATIENCE_S = 30.0


def survey() -> tuple[LoadedBackend | MissingBackend, ...]:
    """Ask each backend library for its devices, in a process for each: 0.2 s and more."""
    return tuple(ask(file.name) for file in available())


def ask(name: str) -> LoadedBackend | MissingBackend:
    """Ask one backend library for its devices, or report how its process ended."""
    command = child_command(_HELPER, name)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return MissingBackend(name=name, reason=f"its driver did not answer within {_PATIENCE_S:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=LoadedBackend | MissingBackend)
    except (IndexError, msgspec.MsgspecError):
        return MissingBackend(name=name, reason=f"the process that loaded it {_describe_exit(done)}")


def _describe_exit(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"died of {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"ended with {done.returncode}: {said[-1] if said else 'without a word'}"
