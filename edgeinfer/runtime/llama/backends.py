"""GPU backends of llama.cpp: their libraries, builds and devices, and which of them a launch uses.

Next to `libggml-NAME.so` lies `libggml-NAME.json`, which describes its build. ggml itself compares only
an interface number, and two builds with one number may have different data structures. So a library is
opened only if its build is that of the llama.cpp in use, and only if no other user may write to it.
Nothing here loads a library into this process.
"""

from __future__ import annotations

import os
import platform
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files as resource_files
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.platform import machine, paths
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.offload_plan import DeviceMemory
from edgeinfer.units import format_bytes

#: Every backend in order of preference: a vendor's own before Vulkan, which shows the same devices.
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

    `added`: it lies in the user's data folder; others came with the program.
    """

    name: str
    path: str
    added: bool
    facts: LibraryFacts | None = None
    problem: str = ""


def this_machine() -> str:
    """Return the machine's name as a build spells it: "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"


def file_name(name: str) -> str:
    """Return a backend's file name, `libggml-vulkan.so`. Raises UsageError for an unknown one."""
    if name not in NAMES:
        raise UsageError(f"there is no backend {name!r}: one of {', '.join(NAMES)}")
    return f"libggml-{name}.so"


def facts_path(library: Path) -> Path:
    return library.with_suffix(".json")


def shipped_dir() -> Path:
    """Return the program's folder of backends; ggml loads all files of the CPU variants' folder."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "backends" if frozen else Path(sys.prefix) / "lib/edgeinfer/backends"


def added_dir() -> Path:
    return paths.data_dir() / "backends"


def adding(name: str) -> str:
    """Describe how to add the library of a backend to this build on this machine."""
    if name == "cuda" and this_machine() == "linux-x86_64" and has_release_key():
        return "edgeinfer backend install cuda"
    by_hand = f"put libggml-{name}.so and .json into {added_dir()}"
    return f"in a checkout `make gpu`, otherwise {by_hand}" if name == "vulkan" else by_hand


def has_release_key() -> bool:
    """Return whether this build can verify what a release offers; a checkout cannot."""
    channel = resource_files("edgeinfer").joinpath("data/release.toml").read_bytes()
    return bool(msgspec.toml.decode(channel)["keys"])


def available() -> tuple[BackendFile, ...]:
    """List the libraries on this machine, one per backend, preferred backends first.

    For each backend a usable library is preferred, and the user's own to the program's.
    """
    return tuple(filter(None, map(find, NAMES)))


def find(name: str, build: Build | None = None) -> BackendFile | None:
    """Find one backend's library, preferably one that fits `build`. Raises UsageError."""
    library = file_name(name)
    places = ((added_dir() / library, True), (shipped_dir() / library, False))
    # Path.is_file raises for a folder that this user may not open
    files = [read(name, path, added=added) for path, added in places if os.path.isfile(path)]
    usable = [file for file in files if not (misfit(file, build) if build else file.problem)]
    return next(iter(usable or files), None)


def read(name: str, path: Path, *, added: bool) -> BackendFile:
    """Describe one library by its JSON file; of the library itself only the size is read."""
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
    """Return why code at `path` must not run; "" if only this user or root may write it."""
    for location in (path, path.parent):
        info = location.stat()
        if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
            return f"another user may write to {location}"
    return ""


#: "gpu" has its own memory, "integrated" shares the machine's, "software" emulates a GPU on the CPU.
Kind = Literal["gpu", "integrated", "software", "accelerator"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a loaded backend, as it was when probed.

    `name` is llama.cpp's ("Vulkan0"), `pointer` its ggml_backend_dev_t, valid only in this process.
    `id` is the PCI address, "" for none. Memory is in bytes, of the whole device; a driver that does
    not know the free memory reports all of it.
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
    """A backend library that is loaded into this process, which cannot be dumped from now on.

    `devices` has at least one. `warning` names a missing dependency, "" for none.
    """

    file: BackendFile
    devices: tuple[Device, ...]
    warning: str = ""


class MissingBackend(msgspec.Struct, frozen=True, kw_only=True, tag="not-loaded"):
    """Why a backend offers no device (one line); `fix` is the command that helps, or "".

    `absent`: nothing is wrong, the machine has no such device, or the library was not added.
    """

    name: str
    reason: str
    fix: str = ""
    absent: bool = False


def device_line(device: Device) -> str:
    kind = {"gpu": "", "integrated": ", integrated", "software": ", in software"}.get(device.kind, "")
    memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
    return f"{device.name}: {device.description}{kind}, {memory}"


def describe(answer: LoadedBackend | MissingBackend) -> str:
    """Return a backend's devices, or why it has none, in a line."""
    if isinstance(answer, MissingBackend):
        return f"{answer.name}: {answer.reason}"
    return f"{answer.file.name}: {'; '.join(map(device_line, answer.devices))}"


class OffloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` is `--gpu-layers`; the other fields are `[gpu]` of the configuration.

    `devices` are llama.cpp's names of the devices to use; () means all except software devices.
    """

    layers: int | str = "auto"
    devices: tuple[str, ...] = ()

    @property
    def is_explicit(self) -> bool:
        """Return whether layers on a device were requested, so that a failure must be reported."""
        return self.layers not in ("auto", "none", 0)

    def opens_backends(self) -> bool:
        """Return whether to open backends: without a request only if there may be a GPU."""
        named = self.is_explicit or bool(self.devices)
        return self.layers not in ("none", 0) and (named or machine.has_gpu())

    def choose(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Choose the named devices, otherwise discrete GPUs, otherwise integrated ones, which share the
        machine's memory, otherwise software devices if layers were requested.
        """
        if self.devices:
            return tuple(device for device in devices if device.name in self.devices)
        for kind in ("gpu", "integrated"):
            if chosen := tuple(device for device in devices if device.kind == kind):
                return chosen
        return tuple(devices) if self.is_explicit else ()

    def usable_memory(self, device: Device) -> DeviceMemory:
        """Return how much of a device's memory may be used."""
        return DeviceMemory(name=device.name, free_bytes=device.free_bytes)


_HELPER = "edgeinfer.runtime.llama.helpers.backend_probe"
#: Longest time (s) of a probe; a slower driver is stuck.
_PATIENCE_S = 30.0


def survey() -> tuple[LoadedBackend | MissingBackend, ...]:
    """Ask each backend library for its devices, each in a separate process: 0.2 s or more."""
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
    return f"ended with {done.returncode}: {said[-1] if said else 'no message'}"
