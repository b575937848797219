"""What trials of devices have found, kept for later processes. Imports no llama.cpp."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.planning.offload import Offload
from edgeinfer.system.cache_files import CacheTable

#: What CPU and devices are compared by: a turn of so many tokens read and written.
_TURN_READ, _TURN_WRITTEN = 512, 128


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of a prompt, and of an answer."""

    prefill: float
    decode: float

    @property
    def turn_s(self) -> float:
        """Seconds of a turn."""
        return _TURN_READ / self.prefill + _TURN_WRITTEN / self.decode

    def __str__(self) -> str:
        return f"{self.prefill:.0f} and {self.decode:.1f} tokens/s"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `place` is where the layers were, `at` seconds since 1970.

    `both` is with prompts read on devices and answers written on the CPU, what was read moved over;
    None for a model whose state is no cells that can be moved piece by piece.
    """

    model: str
    place: str
    cpu: Rates
    devices: Rates
    both: Rates | None
    at: float

    @property
    def best(self) -> Literal["cpu", "devices", "both"]:
        """What takes least time for a turn; the CPU where nothing takes less."""
        found: list[tuple[float, Literal["cpu", "devices", "both"]]] = [
            (self.cpu.turn_s, "cpu"),
            (self.devices.turn_s, "devices"),
        ]
        if self.both is not None:
            found.append((self.both.turn_s, "both"))
        return min(found, key=lambda one: one[0])[1]

    def __str__(self) -> str:
        verb = {
            "cpu": "is no faster",
            "devices": "is faster",
            "both": f"is faster for prompts ({self.both} with the CPU's answers)",
        }[self.best]
        return f"{self.place} {verb}: {self.devices} read and written, the CPU {self.cpu}"


#: Every trial by its key.
TRIALS = CacheTable("gpu-trials.json", dict[str, Trial])


def trial_key(model: str, devices: Sequence[Device], builds: str, offload: Offload) -> str:
    """The name under which a trial is remembered."""
    seen = [f"{d.name} {d.description} {d.driver}" for d in devices]
    return hashlib.sha256("\n".join([model, builds, str(offload), *seen]).encode()).hexdigest()[:32]
