"""Durations as people and Go's programs write them: `90s`, `5m`, `1h30m`."""

from __future__ import annotations

import re

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?")


def parse_duration(text: str) -> float:
    """Seconds of a duration in Go's notation, or of a plain number of seconds. Raises ValueError."""
    plain = text.strip().lstrip("+")
    sign = -1.0 if plain.startswith("-") else 1.0
    plain = plain.removeprefix("-")
    if _PLAIN.fullmatch(plain):
        return sign * float(plain)
    pieces = _PIECE.findall(plain)
    if not pieces or "".join(number + unit for number, unit in pieces) != plain:
        raise ValueError(f"{text[:80]!r} is not a duration; use 90s, 5m or 1h30m")
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in pieces)
