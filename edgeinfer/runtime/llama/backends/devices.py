"""The devices a backend library gives, or the reason for none, and what a launch wants of them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgeinfer.platform import machine
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.llama.backends import files
from edgeinfer.runtime.llama.backends.files import BackendFile
from edgeinfer.runtime.memory_plan.offload import Room
from edgeinfer.units import format_bytes

#: "gpu" has memory of its own, "integrated" shares the machine's, "software" is a CPU that plays a GPU.
Kind = Literal["gpu", "integrated", "software", "accelerator"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a loaded backend, as it was when probed.

    `name` is llama.cpp's ("Vulkan0"), `pointer` its ggml_backend_dev_t, valid in this process alone.
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
    """Why a backend gives no device, in one line, and the command that helps; `fix` "" without one.

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
    `memory_bytes` is the limit on each, 0 for its free memory.
    """

    layers: int | str = "auto"
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0

    @classmethod
    def of(cls, layers: int | str, devices: tuple[str, ...], max_memory_gib: float) -> OffloadRequest:
        """Convert from the configuration's units."""
        return cls(layers=layers, devices=devices, memory_bytes=int(max_memory_gib * (1 << 30)))

    @property
    def is_explicit(self) -> bool:
        """Tell if layers on a device were requested, so that a failure is reported."""
        return self.layers not in ("auto", "none", 0)

    def opens_backends(self) -> bool:
        """Tell if backends are opened: without a request only if there may be a GPU."""
        named = self.is_explicit or bool(self.devices)
        return self.layers not in ("none", 0) and (named or machine.has_gpu())

    def chosen(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Choose the named devices, else GPUs, else software ones if layers were requested."""
        if self.devices:
            return tuple(device for device in devices if device.name in self.devices)
        real = tuple(device for device in devices if device.kind in ("gpu", "integrated"))
        return real if real or not self.is_explicit else tuple(devices)

    def room(self, device: Device) -> Room:
        """Return the memory that may be used of a device."""
        free = device.free_bytes
        return Room(name=device.name, free_bytes=min(free, self.memory_bytes or free))


_HELPER = "edgeinfer.runtime.llama.helpers.backend_probe"
#: A slower driver is stuck.
_PATIENCE_S = 30.0


def survey() -> tuple[LoadedBackend | MissingBackend, ...]:
    """Ask each backend library for its devices, in a process for each: 0.2 s and more."""
    return tuple(ask(file.name) for file in files.available())


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
        return MissingBackend(name=name, reason=f"the process that loaded it {_ended(done)}")


def _ended(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"died of {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"ended with {done.returncode}: {said[-1] if said else 'without a word'}"
