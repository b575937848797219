"""Format and parse sizes and durations."""

from __future__ import annotations

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def format_bytes(n_bytes: float) -> str:
    """Format bytes in decimal units, like sizes of disks and downloads: `98.4 MB`."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_parameters(n_params: int) -> str:
    """Format a number of parameters: `260K`, `135M`, `1.7B`."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if n_params >= size:
            return f"{n_params / size:.{1 if unit == 'B' else 0}f}{unit}"
    return f"{n_params / 1e3:.0f}K" if n_params >= 1000 else str(n_params)


def format_ms(milliseconds: float) -> str:
    """Format milliseconds: `84 ms`, `7.1 s`."""
    return f"{milliseconds:.0f} ms" if milliseconds < 999.5 else f"{milliseconds / 1000:.1f} s"


def format_duration(seconds: float) -> str:
    """Format seconds: `4 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_cost(seconds: float, cached_tokens: int, saved_s: float) -> str:
    """Format a time and its saving: `3.2 s; 12,300 cached tokens saved about 4 min 10 s`."""
    cost = format_ms(seconds * 1000)
    if not cached_tokens or not saved_s:
        return cost
    saved = format_ms(saved_s * 1000) if saved_s < 10 else format_duration(saved_s)
    return f"{cost}; {cached_tokens:,} cached tokens saved about {saved}"


def parse_duration(text: str) -> float:
    """Parse a duration in Go's notation (`90s`, `1h30m`) or a number of seconds; return seconds.

    Raises ValueError for other texts.
    """
    import re  # slow import (5 ms), which a launch avoids

    plain = text.strip().lstrip("+")
    sign = -1.0 if plain.startswith("-") else 1.0
    plain = plain.removeprefix("-")
    if re.fullmatch(r"\d+(?:\.\d+)?", plain):
        return sign * float(plain)
    pieces = re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", plain)
    if not pieces or "".join(number + unit for number, unit in pieces) != plain:
        raise ValueError(f"{text[:80]!r} is not a duration; use 90s, 5m or 1h30m")
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in pieces)
