"""How many copies of a model run: one more when requests would wait, one less when fewer are enough.

Whether another copy writes more on this machine is measured: tokens a second of all copies, under the
load that asks for it, before and after. One that does not raise that is taken away, and what was found
is remembered. Pure arithmetic over facts and times (seconds) that are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

#: A copy more is worth its memory when all write so many times as much.
_WORTH = 1.1
#: What was measured longer ago than this counts less with each new measurement.
_MEMORY_S = 60.0

#: A new copy first reads what others have read: so much of `measured_s` is not measured.
_SETTLING = 0.2

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
    """What so many copies did while enough was asked of them."""

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
        #: By copies: while all their sequences were taken, and while more was asked than one less runs.
        self._full: dict[int, Measured] = {}
        self._tried: dict[int, Measured] = {}
        #: Trials that were lost, and are judged again by what is made after them.
        self._unsure: set[int] = set()
        self._last: Seen | None = None
        self._since: float | None = None
        self._enough_since: float | None = None

    @property
    def rates(self) -> dict[int, float]:
        """Work a second by copies, as far as it is known."""
        rates = {}
        for n in sorted(self._full.keys() | self._tried.keys()):
            rate = self._rate(self._full, n) or self._rate(self._tried, n)
            if rate is not None:
                rates[n] = rate
        return rates

    def changed(self) -> None:
        """Another number of copies runs, or one is about to end: what they do now tells nothing."""
        self._last = None
        self._since = None
        self._enough_since = None

    def look(self, seen: Seen) -> Step:
        """Learn from what is seen, and decide."""
        last, self._last = self._last, seen
        self._since = seen.now if self._since is None else self._since
        is_settled = seen.now - self._since > self.bounds.measured_s * _SETTLING
        if last is not None and is_settled:
            inside = min(last.inside, seen.inside)
            if inside >= seen.copies * seen.slots:
                self._full.setdefault(seen.copies, Measured()).add(last, seen)
            if inside > (seen.copies - 1) * seen.slots:
                self._tried.setdefault(seen.copies, Measured()).add(last, seen)
        if seen.copies > self.bounds.least and self._is_refuted(seen.copies):
            return "shrink"
        if self._would_wait_s(seen) > self.bounds.wait_s:
            return "grow" if self._may_grow(seen.copies) else "stay"
        return self._when_idle(seen)

    def judge(self, model: str, copies: int, at: float) -> Verdict | None:
        """What is known for sure of so many copies, or of one more, if it was not said yet.

        A trial that was lost is judged again when it is known what is made after it: the machine may
        have been slower meanwhile.
        """
        if copies + 1 in self._unsure:
            return self._judge_again(copies + 1, at)
        before, after = self._rate(self._full, copies - 1), self._rate(self._tried, copies)
        if copies in self.verdicts or before is None or after is None:
            return None
        verdict = Verdict(model=model, copies=copies, before=before, after=after, at=at, unit=self.unit)
        self.verdicts[copies] = verdict
        if verdict.is_won:
            return verdict
        self._unsure.add(copies)
        del self._full[copies - 1]
        return None

    def _judge_again(self, copies: int, at: float) -> Verdict | None:
        again = self._rate(self._full, copies - 1)
        if again is None:
            return None
        self._unsure.remove(copies)
        lost = self.verdicts.pop(copies)
        verdict = msgspec.structs.replace(lost, before=(lost.before + again) / 2, at=at)
        if verdict.is_won:
            del self._tried[copies]
            return None
        self.verdicts[copies] = verdict
        return verdict

    def _rate(self, measured: dict[int, Measured], copies: int) -> float | None:
        """Work a second of so many copies; None while it is not known."""
        found = measured.get(copies)
        return found.rate if found is not None and found.seconds >= self.bounds.measured_s else None

    def _is_refuted(self, copies: int) -> bool:
        verdict = self.verdicts.get(copies)
        if verdict is None or verdict.is_won:
            return False
        self.reason = verdict.words
        return True

    def _would_wait_s(self, seen: Seen) -> float:
        found = self._full.get(seen.copies)
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
        elif verdict is not None or self._rate(self._full, copies) is not None:
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
