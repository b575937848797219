"""Finding markers in a text that arrives in pieces: what could still become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers if len(marker) > size):
            return size
    return 0


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Find (place, marker) of the earliest, then longest, marker in `text`; else (-1, "")."""
    best, found = -1, ""
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best < 0 or at < best or (at == best and len(marker) > len(found))):
            best, found = at, marker
    return best, found


def could_become(text: str, literals: Sequence[str]) -> bool:
    """Whether more characters could make `text` one of the literals."""
    return any(len(literal) > len(text) and literal.startswith(text) for literal in literals)
