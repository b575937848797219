"""`keep_alive` in all the forms that Ollama takes, on every route."""

from __future__ import annotations

from edgeinfer.durations import parse_duration
from edgeinfer.errors import InvalidRequestError

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
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidRequestError(f"keep_alive: {error}", param="keep_alive") from None
