"""Measure the energy that this machine uses, if it reports it: RAPL, hwmon, or a battery."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from edgeinfer.platform.machine import read_text

_SYS = Path("/sys")
_NONE = (
    "no RAPL counter, hwmon sensor for the whole machine or battery in use; virtual machines have none"
)


class _Kind(NamedTuple):
    """Files with energy (µJ) or power (µW); a file `label` next to each begins with the text `name`."""

    source: str
    files: str
    label: str
    name: str
    is_power: bool = False

    def measures(self, file: Path) -> bool:
        label = self.label.format(file.name.partition("_")[0])
        return read_text(file.with_name(label)).startswith(self.name)


#: Kinds of energy sources, the best first. Only the first readable kind is used: the others would count
#: the same energy again.
_KINDS = (
    _Kind("of the processors, by RAPL", "powercap/*rapl:*/energy_uj", "name", "package"),
    _Kind("of the processors, by hwmon", "hwmon/hwmon*/energy*_input", "{}_label", "Esocket"),
    _Kind("of the machine, by its power meter", "hwmon/*/power1_average", "name", "power_meter", True),
    _Kind("of the machine, by its battery", "power_supply/*/power_now", "status", "Discharging", True),
)


class EnergyMeter:
    """Measures the energy (J) that this machine or its processors use between calls of `read_joules`.

    RAPL and hwmon count energy. A power meter and a battery report power, so the mean of two calls is
    multiplied by the time between them. `source` says what is measured; if it is "", nothing is
    measured, and `reason` says why.
    """

    def __init__(self, sys: Path | None = None) -> None:
        self._last: tuple[float, list[int]] | None = None
        self._files: list[Path] = []
        self.source, self.reason = "", _NONE
        for self._kind in _KINDS:
            folders = sorted((sys or _SYS).glob(f"class/{self._kind.files}"))
            files = [file for file in folders if self._kind.measures(file)]
            secret = next((file for file in files if _number(file) is None), None)
            if files and secret is None:
                self.source, self.reason = self._kind.source, ""
                self._files = files
                break
            if secret and self.reason is _NONE:
                self.reason = f"this user may not read {secret}"
        ranges = (_number(file.with_name("max_energy_range_uj")) for file in self._files)
        self._wraps = [wrap or 1 << 64 for wrap in ranges]

    def read_joules(self) -> float | None:
        """Return the energy (J) since the last call, 0.0 at first; None if a file cannot be read."""
        values = [_number(file) for file in self._files if self._kind.measures(file)]
        readings = [value for value in values if value is not None]
        if not readings or len(readings) < len(self._files):
            self._files = []
            self.reason = self.reason or f"the energy {self.source}, is no longer reported"
            return None
        now = time.monotonic()
        then, before = self._last or (now, readings)
        self._last = now, readings
        pairs = zip(before, readings, self._wraps, strict=True)
        if self._kind.is_power:
            return sum((a + b) / 2 for a, b, _ in pairs) * (now - then) / 1e6
        return sum((b - a) % wrap for a, b, wrap in pairs) / 1e6


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdecimal() else None
