"""`keep_alive` in all the forms that Ollama takes, on every route."""

from __future__ import annotations

import re

from edgeinfer.errors import InvalidRequestError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?")
_YEAR_S = 31_536_000.0
FOR_EVER = -1.0


def keep_alive_s(given: float | str | None) -> float | None:
    """Seconds; -1 for ever, which every negative duration means. Raises InvalidRequestError.

    A text is a duration in Go's notation ("5m", "1h30m"), or a plain number of seconds.
    """
    if given is None:
        return None
    seconds = _parsed(given) if isinstance(given, str) else given
    if seconds < 0:
        return FOR_EVER
    return seconds if seconds <= _YEAR_S else FOR_EVER


def _parsed(text: str) -> float:
    plain = text.strip().lstrip("+")
    sign = -1.0 if plain.startswith("-") else 1.0
    plain = plain.removeprefix("-")
    if _PLAIN.fullmatch(plain):
        return sign * float(plain)
    pieces = _PIECE.findall(plain)
    if not pieces or "".join(number + unit for number, unit in pieces) != plain:
        raise InvalidRequestError(
            f'keep_alive: {text[:80]!r} is no duration; "5m", "1h30m" and seconds are',
            param="keep_alive",
        )
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in pieces)
