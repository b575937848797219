"""GPU backends of llama.cpp: their libraries, builds and devices, and which of them a launch uses.

The file `libggml-NAME.json` next to a library `libggml-NAME.so` describes its build. A library
is used only if the llama.cpp in use has the same build, because ggml itself checks only an interface
number; and only if no other user may write to the file. This module loads no library into the process.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files as resource_files
from pathlib import Path

import msgspec

from edgeinfer.errors import EngineClosedError, SnapshotUnsafeError, UsageError
from edgeinfer.platform import disk, machine, paths
from edgeinfer.platform.process import ask_child
from edgeinfer.runtime.layer_plan import Device
from edgeinfer.snapshot_format.storage import refuse_unsafe_ancestors
from edgeinfer.units import format_bytes

#: All backends, preferred ones first. Vulkan offers the same devices as CUDA.
NAMES = ("cuda", "vulkan")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What a library was built from: versions of llama-cpp-python (`binding`) and of `ggml`.

    `commit` is ggml's git commit, "unknown" if built without git. `machine`: such as "linux-x86_64".
    """

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
    """Contents of the JSON file next to a backend's library."""

    name: str
    build: Build
    sha256: str
    size_bytes: int


class BackendFile(msgspec.Struct, frozen=True, kw_only=True):
    """A backend library on this machine. `problem`: why it cannot be used, "" if it can.

    `fix`: what to do about the problem. `added`: the user has added the library to the data folder; it
    did not come with the program. `facts`: contents of the JSON file next to it, None if unreadable.
    `stamp`: the library's path, size, mtime and inode.
    """

    name: str
    path: str
    added: bool
    facts: LibraryFacts | None = None
    stamp: str = ""
    problem: str = ""
    fix: str = ""


def this_machine() -> str:
    """Return the platform as `Build.machine` names it, such as "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine().lower()}"


def file_name(name: str) -> str:
    """Return the file name of a backend's library. Raises UsageError for an unknown backend."""
    if name not in NAMES:
        raise UsageError(f"there is no backend {name!r}", hint=f"use {' or '.join(NAMES)}")
    return f"libggml-{name}.so"


def facts_path(library: Path) -> Path:
    return library.with_suffix(".json")


def shipped_dir() -> Path:
    """Return the folder of the program's own backends. ggml does not load them by itself."""
    frozen = getattr(sys, "_MEIPASS", None)
    return Path(frozen) / "backends" if frozen else Path(sys.prefix) / "lib/edgeinfer/backends"


def added_dir() -> Path:
    return paths.data_dir() / "backends"


def how_to_add(name: str) -> str:
    """Return what to do to get the library of a backend for this build and machine."""
    if name == "cuda" and this_machine() == "linux-x86_64" and has_release_key():
        return "edgeinfer backend install cuda"
    by_hand = f"put libggml-{name}.so and .json into {added_dir()}"
    if name == "vulkan":
        return f"in a checkout `make gpu`, otherwise {by_hand}"
    return f"{by_hand}: `make cuda` in a checkout makes them"


def has_release_key() -> bool:
    """Return whether this build can verify signed releases; a checkout cannot."""
    channel = resource_files("edgeinfer").joinpath("data/release.toml").read_bytes()
    return bool(msgspec.toml.decode(channel)["keys"])


def available() -> tuple[BackendFile, ...]:
    """Find the library of each backend that is on this machine, preferred backends first."""
    return tuple(filter(None, map(find, NAMES)))


def find(name: str, build: Build | None = None) -> BackendFile | None:
    """Find a backend's library, None without one. Raises UsageError for an unknown backend.

    A library that fits `build` is preferred, then one that the user added.
    """
    library = file_name(name)
    places = ((added_dir() / library, True), (shipped_dir() / library, False))
    # not Path.is_file, which raises for a folder that this user may not open
    files = [read(name, path, added=added) for path, added in places if os.path.isfile(path)]
    usable = [file for file in files if not (misfit(file, build) if build else file.problem)]
    return next(iter(usable or files), None)


def read(name: str, path: Path, *, added: bool) -> BackendFile:
    """Describe a library by the JSON file next to it; `problem` says why it cannot be used."""
    file = BackendFile(name=name, path=str(path), added=added, fix=how_to_add(name) if added else "")
    description = facts_path(path)
    try:
        if added:  # other users who can change the program's libraries can change the program too
            refuse_exposed(path.parent)
        facts = msgspec.json.decode(disk.read_regular(description), type=LibraryFacts)
        file = msgspec.structs.replace(file, facts=facts, stamp=disk.stamps((str(path),)))
        if (facts.name, facts.size_bytes) == (name, path.stat().st_size):
            return file
        problem = f"{path.name} is not the file that {description.name} describes"
    except SnapshotUnsafeError as error:
        return msgspec.structs.replace(file, problem=error.message, fix=error.hint or "")
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        problem = f"{description.name} does not say which llama.cpp it was built for: {error}"
    return msgspec.structs.replace(file, problem=problem)


def misfit(file: BackendFile, build: Build) -> str:
    """Return why a library cannot be loaded into the llama.cpp of `build`, "" if it can."""
    if file.problem or file.facts is None:
        return file.problem
    if file.facts.build.fits(build):
        return ""
    return f"{os.path.basename(file.path)} was built for {file.facts.build}; this is {build}"


def refuse_exposed(folder: Path) -> None:
    """Raise SnapshotUnsafeError if another user could change a library in `folder`. Raises OSError."""
    for path in (folder, *filter(os.path.exists, folder.glob("lib*.so*"))):
        refuse_unsafe_ancestors(f"{path}/")  # the final "/" includes `path` itself


class LoadedBackend(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """A loaded backend and its devices (at least one). CRIU cannot dump a process that loaded it.

    `warning` names a missing dependency, "" if there is none.
    """

    file: BackendFile
    devices: tuple[Device, ...]
    warning: str = ""


class MissingBackend(msgspec.Struct, frozen=True, kw_only=True, tag="not-loaded"):
    """Why a backend offers no device (`reason`), and what to do about that (`fix`, "" if unknown).

    `absent` is True if nothing has failed: the machine lacks the device, the driver or the library.
    """

    name: str
    reason: str
    fix: str = ""
    absent: bool = False


#: The outcome of opening a backend.
BackendOutcome = LoadedBackend | MissingBackend


def not_installed(name: str) -> MissingBackend:
    reason = "its library is not installed"
    return MissingBackend(name=name, reason=reason, fix=how_to_add(name), absent=True)


def device_line(device: Device) -> str:
    kind = {"gpu": "", "integrated": ", integrated", "software": ", in software"}.get(device.kind, "")
    memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
    return f"{device.name}: {device.description}{kind}, {memory}"


def describe(outcome: BackendOutcome) -> str:
    """Return a line that names a backend's devices, or says why it has none."""
    if isinstance(outcome, MissingBackend):
        return f"{outcome.name}: {outcome.reason}"
    return f"{outcome.file.name}: {'; '.join(map(device_line, outcome.devices))}"


class OffloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers to place on which devices.

    `layers` is the value of `--gpu-layers`. `devices` are llama.cpp's names of the devices to use, from
    `[gpu]` of config.toml; () means all discrete GPUs or, if there are none, integrated ones.
    """

    layers: int | str = "auto"
    devices: tuple[str, ...] = ()

    @property
    def is_explicit(self) -> bool:
        """Return whether `--gpu-layers` asks for layers on devices; a failure then causes a warning."""
        return self.layers not in ("auto", "none", 0)

    def opens_backends(self) -> bool:
        """Return whether to look for devices: the user asks for some, or the machine may have a GPU.

        False if `layers` is "none" or 0.
        """
        named = self.is_explicit or bool(self.devices)
        return self.layers not in ("none", 0) and (named or machine.has_gpu())

    def choose(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return those of `devices` that the request names.

        If it names none, return all discrete GPUs or, if there are none, all integrated ones. Without
        a GPU, return all devices if the request `is_explicit`, otherwise ().
        """
        if self.devices:
            return tuple(device for device in devices if device.name in self.devices)
        for kind in ("gpu", "integrated"):
            if chosen := tuple(device for device in devices if device.kind == kind):
                return chosen
        return tuple(devices) if self.is_explicit else ()


class OffloadRefused(Exception):
    """No layers can be placed on devices; the message says why."""


def find_devices(
    request: OffloadRequest,
    open_backend: Callable[[BackendFile], BackendOutcome] = lambda file: ask(file.name),
) -> Iterator[tuple[Device, ...]]:
    """Yield the devices that `request` chooses of each backend, preferred backends first.

    By default a separate process opens the backends; then the devices' pointers are not valid here.
    Raises OffloadRefused if no backend has such a device.
    """
    files, reasons = available(), []
    for file in files:
        outcome = open_backend(file)
        if isinstance(outcome, MissingBackend):
            reasons.append(describe(outcome))
        elif devices := request.choose(outcome.devices):
            yield devices
        else:
            names = f"{' or '.join(request.devices)} (`gpu.devices` in config.toml)"
            device = names if request.devices else "that was requested"
            reasons.append(f"{file.name} has no device {device}")
    if len(reasons) == len(files):
        raise OffloadRefused("; ".join(reasons) or "no GPU library was found: see `edgeinfer doctor`")


_HELPER = "edgeinfer.runtime.llama.helpers.backend_probe"
#: Library of NVIDIA's driver. `ask(DRIVER)` loads no backend, but checks the driver's version.
DRIVER = "libcuda.so.1"
#: A driver that does not answer for this long (s) is considered stuck.
_PATIENCE_S = 30.0


def ask(name: str, stop: threading.Event | None = None) -> BackendOutcome:
    """Ask a backend for its devices, in a separate process, because loading a library may crash.

    Takes 0.14 s or more. Raises EngineClosedError once `stop` is set.
    """
    try:
        out, ending = ask_child(_HELPER, name, patience_s=_PATIENCE_S, stop=stop)
        if stop is not None and stop.is_set():
            raise EngineClosedError("the engine is closed")
        return msgspec.json.decode(out, type=LoadedBackend | MissingBackend)
    except msgspec.MsgspecError:
        return MissingBackend(name=name, reason=f"the process that loaded it {ending}")
    except OSError as error:
        return MissingBackend(name=name, reason=f"no process could be started to load it: {error}")


def driver_problem() -> MissingBackend | None:
    """Ask NVIDIA's driver why it cannot run the CUDA backend; None if it can. No device is opened."""
    answer = ask(DRIVER)
    return answer if isinstance(answer, MissingBackend) and answer.reason else None
