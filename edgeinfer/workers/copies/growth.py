"""Decide how many copies run, by waiting requests and idle copies: pure arithmetic over times (s)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Step = Literal["grow", "shrink", "stay"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`least` to `most` copies.

    One more when a request has waited longer than `wait_s`, one less when for `idle_s` one fewer
    would have been enough.
    """

    least: int
    most: int
    wait_s: float = 5.0
    idle_s: float = 60.0


@dataclass(kw_only=True)
class Seen:
    """The copies at time `now` (s): how many, requests that no copy has begun (the oldest for
    `oldest_s`), requests in all, and sequences that one copy decodes at once.
    """

    now: float
    copies: int
    waiting: int
    oldest_s: float
    inside: int
    slots: int


@dataclass
class Growth:
    """The decision, with its reason. `cores` are what the copies share: each has one at least."""

    bounds: Bounds
    cores: int
    reason: str = "the least that may run"
    _idle_since: float | None = None

    def changed(self) -> None:
        """Start observing again after the number of copies changed."""
        self._idle_since = None

    def look(self, seen: Seen) -> Step:
        if seen.waiting and seen.oldest_s > self.bounds.wait_s:
            return self._when_waiting(seen.copies)
        return self._when_idle(seen)

    def _when_waiting(self, copies: int) -> Step:
        self._idle_since = None
        if copies >= self.bounds.most:
            self.reason = "the most that may run"
        elif copies >= self.cores:
            self.reason = "each has one core"
        else:
            self.reason = f"requests waited longer than {self.bounds.wait_s:g} s"
            return "grow"
        return "stay"

    def _when_idle(self, seen: Seen) -> Step:
        fewer = (seen.copies - 1) * seen.slots
        if seen.copies <= self.bounds.least or seen.waiting or seen.inside > fewer:
            self._idle_since = None
            return "stay"
        self._idle_since = seen.now if self._idle_since is None else self._idle_since
        if seen.now - self._idle_since < self.bounds.idle_s:
            return "stay"
        self.reason = f"{seen.copies - 1} were enough for {self.bounds.idle_s:g} s"
        return "shrink"
