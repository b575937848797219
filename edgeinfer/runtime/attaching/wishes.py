"""What a launch wants of devices, and which of them it gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.planning.offload import Room
from edgeinfer.system import machine


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` is `--gpu-layers`; the rest is `[gpu]` of the configuration.

    `devices` are llama.cpp's names of those to use, none for every one that is no software.
    `memory_bytes` is the most that is taken of each, 0 for what is free.
    """

    layers: int | str = "auto"
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0

    @classmethod
    def of(cls, layers: int | str, devices: tuple[str, ...], max_memory_gib: float) -> Wishes:
        """From the configuration's units."""
        return cls(layers=layers, devices=devices, memory_bytes=int(max_memory_gib * (1 << 30)))

    @property
    def is_explicit(self) -> bool:
        """Whether somebody asked for layers on a device, and wants to hear when there are none."""
        return self.layers not in ("auto", "none", 0)

    def is_worth_asking(self) -> bool:
        """Whether backends are to be opened at all: by themselves only where there may be a GPU."""
        named = self.is_explicit or bool(self.devices)
        return self.layers not in ("none", 0) and (named or machine.has_gpu())

    def chosen(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Those to use, in order: the named, else GPUs, else software where layers were asked for."""
        if self.devices:
            return tuple(device for device in devices if device.name in self.devices)
        real = tuple(device for device in devices if device.kind in ("gpu", "integrated"))
        return real if real or not self.is_explicit else tuple(devices)

    def room(self, device: Device) -> Room:
        """The memory that may be taken of a device."""
        free = device.free_bytes
        return Room(name=device.name, free_bytes=min(free, self.memory_bytes or free))
