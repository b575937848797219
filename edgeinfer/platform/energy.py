"""The energy that this machine has used, if it tells: RAPL, hwmon, or a battery in use."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_SYS = Path("/sys")
_NONE = (
    "no RAPL counter, no sensor of hwmon for the whole, no battery in use; virtual machines have none"
)


class EnergyMeter:
    """Reads joules between two calls of `used`.

    RAPL and hwmon's sockets count the processors' energy; a power meter or a battery, the machine's, is
    integrated between calls, a second apart at best. `source` names what is read, `reason` tells why
    nothing is; the other one is "".
    """

    def __init__(self, sys: Path | None = None) -> None:
        self._last: tuple[float, list[int]] | None = None
        self._wraps: list[int] = []
        self._files: list[Path] = []
        self.source = ""
        self.reason = self._find(sys or _SYS)

    def _find(self, sys: Path) -> str:
        """Take the first kind of source that can be read; kinds overlap and are never added."""
        rapl = [p / "energy_uj" for p in sorted(sys.glob("class/powercap/*rapl:*"))]
        packages = [p for p in rapl if _text(p.with_name("name")).startswith("package")]
        hwmon = sorted(sys.glob("class/hwmon/hwmon*"))
        sockets = [
            p
            for folder in hwmon
            for p in sorted(folder.glob("energy*_input"))
            if _text(p.with_name(p.name.replace("_input", "_label"))).startswith("Esocket")
        ]
        meters = [f / "power1_average" for f in hwmon if _text(f / "name") == "power_meter"]
        batteries = [
            p / "power_now"
            for p in sorted(sys.glob("class/power_supply/*"))
            if _text(p / "status") == "Discharging"
        ]
        for source, files in (
            ("of the processors, by RAPL", packages),
            ("of the processors, by hwmon", sockets),
            ("of the machine, by its power meter", meters),
            ("of the machine, by its battery", batteries),
        ):
            if files and all(_number(p) is not None for p in files):
                self.source, self._files = source, files
                ranges = (_number(p.with_name("max_energy_range_uj")) for p in files)
                self._wraps = [wrap or 1 << 64 for wrap in ranges]
                self._is_power = files in (meters, batteries)
                return ""
        secret = next((p for p in packages if p.exists()), None)
        return f"only root may read {secret}" if secret else _NONE

    def used(self) -> float | None:
        """Return the joules since the last call, 0 at first; None if unreadable, and from then on."""
        values = [_number(p) for p in self._files]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            self._files = []
            self.reason = self.reason or f"the energy {self.source} is no longer told"
            return None
        now = time.monotonic()
        then, before = self._last or (now, known)
        self._last = now, known
        pairs = zip(before, known, self._wraps, strict=True)
        if self._is_power:
            return sum((a + b) / 2 for a, b, _ in pairs) * (now - then) / 1e6
        return sum((b - a) % wrap for a, b, wrap in pairs) / 1e6


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
