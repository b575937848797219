"""How many copies of a model run: one more when requests would wait too long, one less when it is
idle.

Whether another copy writes more on this machine is measured: tokens a second of all copies, while
requests wait, before and after. One that did not raise that is taken away, and what was found is
remembered. Pure arithmetic over facts and times (seconds) that are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

#: A copy more is worth its memory when all write so many times as much.
_WORTH = 1.1
#: What was measured longer ago than this counts less with each new measurement.
_MEMORY_S = 60.0

#: What is to be done.
Step = Literal["grow", "shrink", "stay"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`least` to `most` copies.

    One more when a request would wait longer than `wait_s`, one less when for `idle_s` fewer would
    have been enough; a rate is known after `measured_s` during which requests waited.
    """

    least: int
    most: int
    wait_s: float = 5.0
    idle_s: float = 60.0
    measured_s: float = 10.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial of so many copies found. Rates in `unit` a second; `at` in seconds since 1970."""

    model: str
    copies: int
    before: float
    after: float
    at: float
    unit: str = "tokens"

    @property
    def is_won(self) -> bool:
        """Whether the copy more raised the rate of all."""
        return self.after >= self.before * _WORTH

    @property
    def words(self) -> str:
        """The figures in a sentence."""
        said = f"{self.copies} make {self.after:.0f} {self.unit}/s"
        said += f", {self.copies - 1} made {self.before:.0f}"
        return said if self.is_won else f"{said}: another does not help on this machine"


@dataclass(kw_only=True)
class Seen:
    """The copies at one moment. `work` and `ended` are sums of tokens and requests since the start.

    `waiting` requests were begun by no copy, the oldest since `oldest_s`; `inside` are all; `slots`
    is how many one copy decodes at once.
    """

    now: float
    copies: int
    waiting: int
    oldest_s: float
    inside: int
    slots: int
    work: float
    ended: int


@dataclass
class Measured:
    """What so many copies did while requests waited."""

    seconds: float = 0.0
    work: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        return self.work / self.seconds if self.seconds else 0.0

    def add(self, before: Seen, after: Seen) -> None:
        seconds = after.now - before.now
        weight = min(1.0, _MEMORY_S / (self.seconds + seconds))
        self.seconds = self.seconds * weight + seconds
        self.work = self.work * weight + after.work - before.work
        self.ended = self.ended * weight + after.ended - before.ended


@dataclass
class Growth:
    """Decides, and says why. `cores` are what the copies share."""

    bounds: Bounds
    cores: int
    unit: str = "tokens"
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    reason: str = "the least that may run"

    def __post_init__(self) -> None:
        self.measured: dict[int, Measured] = {}
        self._last: Seen | None = None
        self._enough_since: float | None = None

    @property
    def rates(self) -> dict[int, float]:
        """Work a second by copies, as far as it is known."""
        return {n: found.rate for n, found in self.measured.items() if self._is_known(n)}

    def changed(self) -> None:
        """Another number of copies runs: what is between two looks belongs to neither."""
        self._last = None
        self._enough_since = None

    def look(self, seen: Seen) -> Step:
        """Learn from what is seen, and decide."""
        last, self._last = self._last, seen
        if last is not None and last.copies == seen.copies and last.waiting and seen.waiting:
            self.measured.setdefault(seen.copies, Measured()).add(last, seen)
        if seen.copies > self.bounds.least and self._is_refuted(seen.copies):
            return "shrink"
        if self._would_wait_s(seen) > self.bounds.wait_s:
            return "grow" if self._may_grow(seen.copies) else "stay"
        return self._when_idle(seen)

    def judge(self, model: str, copies: int, at: float) -> Verdict | None:
        """What is known of so many copies beside one less, if it was not said yet."""
        if copies in self.verdicts or not (self._is_known(copies) and self._is_known(copies - 1)):
            return None
        before, after = self.measured[copies - 1].rate, self.measured[copies].rate
        verdict = Verdict(model=model, copies=copies, before=before, after=after, at=at, unit=self.unit)
        self.verdicts[copies] = verdict
        return verdict

    def _is_known(self, copies: int) -> bool:
        found = self.measured.get(copies)
        return found is not None and found.seconds >= self.bounds.measured_s

    def _is_refuted(self, copies: int) -> bool:
        verdict = self.verdicts.get(copies)
        if verdict is None or verdict.is_won:
            return False
        self.reason = verdict.words
        return True

    def _would_wait_s(self, seen: Seen) -> float:
        found = self.measured.get(seen.copies)
        if not seen.waiting or found is None or not found.ended:
            return seen.oldest_s
        return max(seen.oldest_s, seen.waiting * found.seconds / found.ended)

    def _may_grow(self, copies: int) -> bool:
        verdict = self.verdicts.get(copies + 1)
        if copies >= self.bounds.most:
            self.reason = "no more may run"
        elif copies >= self.cores:
            self.reason = f"there is a core for each of {copies}, and none for another"
        elif verdict is not None and not verdict.is_won:
            self.reason = verdict.words
        elif self._is_known(copies):
            self.reason = f"requests would wait longer than {self.bounds.wait_s:g} s"
            return True
        return False

    def _when_idle(self, seen: Seen) -> Step:
        fewer = (seen.copies - 1) * seen.slots
        if seen.copies <= self.bounds.least or seen.waiting or seen.inside > fewer:
            self._enough_since = None
            return "stay"
        self._enough_since = seen.now if self._enough_since is None else self._enough_since
        if seen.now - self._enough_since < self.bounds.idle_s:
            return "stay"
        self.reason = f"{seen.copies - 1} were enough for {self.bounds.idle_s:g} s"
        return "shrink"
