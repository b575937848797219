"""What loading a backend library gives: devices, or the reason why there are none."""

from __future__ import annotations

from typing import Literal

import msgspec

from edgeinfer.runtime.backends.files import BackendFile
from edgeinfer.units import format_bytes

#: "gpu" has memory of its own, "integrated" shares the machine's, "software" is a CPU that plays a GPU.
Kind = Literal["gpu", "integrated", "software", "accelerator"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a loaded backend, as it was when it was asked.

    `name` is llama.cpp's ("Vulkan0"), `pointer` its ggml_backend_dev_t, of use in this process alone.
    `driver` is name and version in one line, "" where nobody says. `id` is the PCI address, "" for
    none. Memory in bytes, of the whole device; a driver that does not tell says all of it is free.
    """

    name: str
    description: str
    kind: Kind
    backend: str
    driver: str = ""
    id: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    pointer: int = 0


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """A backend library that is registered in this process, which can't be dumped from now on.

    `devices` has at least one. `warning` says what it will lack, "" for nothing.
    """

    file: BackendFile
    devices: tuple[Device, ...]
    warning: str = ""


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="not-loaded"):
    """Why a backend gives no device, in one line, and what to type; `fix` "" where nothing helps.

    `absent` is true where nothing is wrong: the machine has no such device, or no such library was
    added.
    """

    name: str
    reason: str
    fix: str = ""
    absent: bool = False


def device_line(device: Device) -> str:
    """One device on one line: name, kind, memory, driver."""
    kind = {"gpu": "", "integrated": ", integrated", "software": ", in software"}.get(device.kind, "")
    memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
    driver = f"; {device.driver}" if device.driver else ""
    return f"{device.name}: {device.description}{kind}, {memory}{driver}"
