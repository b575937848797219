"""Speculative decoding: draft tokens, verified in one step, while they gain more than they cost.

A draft token is only kept if it is the token the sampler picks from the model's own logits, so the text
is the same with and without; only the time differs.

Drafts come from the text itself and from past answers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

import numpy as np

from edgeinfer.runtime.sampling.past_answers import CONTEXT_TOKENS, LONGEST, AnswerFile, Tokens

#: Rows at which the cost of a step is known, in steps of one row: linear between, and beyond the last.
_ROWS = (1, 2, 4, 8, 16, 32)
#: Those costs before any was measured: two to three times those of our kernels.
_ASSUMED = (1.0, 1.35, 2.0, 3.3, 6.0, 11.5)
#: Time (s) that the curve is measured for, once at least.
_MEASURE_S = 0.7
#: Weight of one step without drafts in the mean, of one with drafts in it, and of one with drafts in
#: the curve, where an assumed cost counts as one step and a measured one as many.
_PLAIN_WEIGHT = 0.1
_DRIFT = 0.03
_CURVE_WEIGHT = 0.08
#: Expected gain over cost from which tokens are drafted: step times are noisy.
_MARGIN = 1.4


class StepCurve:
    """What decode-only steps cost by their rows and sequences. Shared by all sequences.

    The curve is relative to one row: the depth of the cache and other programs move all of it.
    """

    def __init__(self) -> None:
        self._points = list(_ASSUMED)
        self._weights = [1.0] * len(_ROWS)
        self._plain_s: dict[int, float] = {}

    def measure(self, step_s: Callable[[int], float]) -> None:
        """Learn the curve; `step_s` computes a step of so many rows and returns its time (s)."""
        best, until = [math.inf] * len(_ROWS), time.monotonic() + _MEASURE_S
        while time.monotonic() < until:
            best = [min(seconds, step_s(rows)) for seconds, rows in zip(best, _ROWS, strict=True)]
        best = [min(best[i:]) for i in range(len(best))]  # slower than more rows: disturbed
        self._set_points([seconds / best[0] for seconds in best])
        self._weights = [_CURVE_WEIGHT] * len(_ROWS)
        self._plain_s = {1: best[0]}

    def note(self, n_sequences: int, rows: int, seconds: float) -> None:
        """Record a step of `n_sequences`, of so many rows with drafts and forced tokens."""
        expected_s = self.seconds(n_sequences, rows)
        if expected_s is None:
            if rows == n_sequences:
                self._plain_s[n_sequences] = seconds
            return
        change = min(max(seconds / expected_s, 0.5), 2.0) - 1.0  # no outlier counts
        if rows == n_sequences:
            self._plain_s[n_sequences] *= 1.0 + _PLAIN_WEIGHT * change
            return
        self._plain_s[n_sequences] *= 1.0 + _DRIFT * change
        i = _segment(rows)
        share = min(1.0, (rows - _ROWS[i - 1]) / (_ROWS[i] - _ROWS[i - 1]))
        points, shares = list(self._points), {i - 1: 1.0 - share, i: share}
        for j, weight in enumerate(self._weights):
            if _ROWS[j] <= n_sequences or not (j in shares or weight == 1.0):
                continue  # an assumed cost follows the nearest measured one
            points[j] *= 1.0 + change * weight * shares.get(j, 0.5) / (1.0 + weight)
            if shares.get(j):
                self._weights[j] = max(_CURVE_WEIGHT, weight / (1.0 + weight))
        self._set_points(points)

    def _set_points(self, points: list[float]) -> None:
        self._points = list(accumulate(points, max))  # more rows never cost less: that is noise

    def seconds(self, n_sequences: int, rows: int) -> float | None:
        """Return the time (s) of a step of `n_sequences` with `rows`, None before the first one."""
        plain_s = self._plain_s.get(n_sequences)
        return None if plain_s is None else plain_s * self._cost(rows) / self._cost(n_sequences)

    def _cost(self, rows: int) -> float:
        i = _segment(rows)
        slope = (self._points[i] - self._points[i - 1]) / (_ROWS[i] - _ROWS[i - 1])
        return self._points[i - 1] + slope * (rows - _ROWS[i - 1])


def _segment(rows: int) -> int:
    return min(max(1, bisect_left(_ROWS, rows)), len(_ROWS) - 1)


class DraftBudget:
    """Decide how many draft tokens the step being planned carries, over all its sequences."""

    def __init__(self, curve: StepCurve, n_sequences: int, rows: int) -> None:
        self._curve, self._n_sequences = curve, n_sequences
        self._rows, self._expected = rows, float(n_sequences)

    def take(self, chances: Sequence[float]) -> int:
        """Return how many draft tokens of one sequence give the most tokens a second, and add them.

        `chances`: each one's to be right if those before it are.
        """
        base_s = self._curve.seconds(self._n_sequences, self._rows)
        if base_s is None:
            return 0
        best, best_rate = 0, self._expected / base_s
        best_gain = gain = 0.0
        chance = 1.0
        for n, rate in enumerate(chances, 1):
            chance *= rate
            gain += chance
            step_s = self._curve.seconds(self._n_sequences, self._rows + n)
            assert step_s is not None
            cost_s = step_s - base_s
            total = (self._expected + gain) / step_s
            if total > best_rate and gain * base_s > _MARGIN * cost_s * self._expected:
                best, best_rate = n, total
                best_gain = gain
        self._rows += best
        self._expected += best_gain
        return best

    def pays(self, n: int) -> bool:
        """Tell if up to `n` draft tokens would pay if all of them were right."""
        before = self._rows, self._expected
        try:
            return self.take([1.0] * n) > 0
        finally:
            self._rows, self._expected = before


#: Acceptance rate that is assumed before anything was verified, by the length of the match (from so
#: many tokens on), and the weight of one verified token.
_LENGTHS = (2, 3, 4, 6, 9, 16, 32)
_START = (0.3, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95)
_WEIGHT = 0.12


class Acceptance:
    """A running rate of draft tokens that were right, each after only right ones."""

    def __init__(self, start: float) -> None:
        self.rate = start

    def note(self, *, is_right: bool) -> None:
        self.rate += _WEIGHT * (is_right - self.rate)


class SuffixDrafter:
    """Draft what followed the longest suffix of the text where it occurred before: in the text itself
    or, if `answers` are given, in past ones. Of several places the latest counts.
    """

    def __init__(self, n_vocab: int) -> None:
        self.answers: AnswerFile | None = None
        self._n_vocab = n_vocab
        self._rates = [[Acceptance(start) for start in _START] for _ in range(2)]
        self._text: Tokens = np.empty(0, np.int32)
        self._n = 0
        #: Where the latest draft was found: in past answers or not, the place of its next token, and
        #: the tokens before it that agree.
        self._is_past = False
        self._place = self._length = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens; none if the end of `tokens` is new."""
        n_known = self._n if self._n <= len(tokens) else 0  # a context shift dropped tokens
        self._append(tokens, n_known)
        if not (n_known and self._follows(n_known)):
            self._search()
        if self._length < _LENGTHS[0] or limit <= 0:
            return []
        if not self._is_past:  # a repetition goes on behind the end of the text
            again = np.resize(self._text[self._place : self._n], limit).tolist()
            return list(takewhile(lambda token: token >= 0, again))  # rows of a picture are no tokens
        assert self.answers is not None
        found = self.answers.ring[self._place : self._place + limit].tolist()
        return list(takewhile(lambda token: 0 <= token < self._n_vocab, found))

    def _append(self, tokens: Sequence[int], n_known: int) -> None:
        if len(tokens) > len(self._text):
            grown = np.empty(len(tokens) * 2, np.int32)
            grown[:n_known] = self._text[:n_known]
            self._text = grown
        self._text[n_known : len(tokens)] = tokens[n_known:]
        self._n = len(tokens)

    def _follows(self, n_known: int) -> bool:
        """Go on at the place of the latest draft if it was right, and the match is long."""
        n_new = self._n - n_known
        source = self.answers.ring if self._is_past and self.answers else self._text
        there = source[self._place : self._place + n_new]
        if not self._length or not np.array_equal(there, self._text[n_known : self._n]):
            return False
        self._place += n_new
        self._length += n_new
        return self._length >= CONTEXT_TOKENS

    def _search(self) -> None:
        self._is_past = False
        self._place, self._length = self._find_in_text()
        if self.answers is not None and self._length < CONTEXT_TOKENS:
            place, length = self.answers.find(self._text[: self._n])
            if length > self._length:
                self._is_past = True
                self._place, self._length = place, length

    def _find_in_text(self) -> tuple[int, int]:
        text, n = self._text, self._n
        if n < _LENGTHS[0] + 1:
            return 0, 0
        ends = np.flatnonzero((text[1 : n - 1] == text[n - 1]) & (text[: n - 2] == text[n - 2])) + 2
        if not len(ends):
            return 0, 0
        length = 2
        while length < LONGEST:
            longer = ends[ends > length]
            longer = longer[text[longer - 1 - length] == text[n - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[-1]), length

    def acceptance(self, position: int) -> Acceptance:
        """Return the rate of the latest draft's token at `position`."""
        length = max(self._length + position, _LENGTHS[0])
        return self._rates[self._is_past][bisect_right(_LENGTHS, length) - 1]


class Drafting:
    """One sequence's speculation. `is_forced`: draft at any price, as the request says."""

    def __init__(self, drafter: SuffixDrafter | None, *, limit: int, is_forced: bool = False) -> None:
        self._drafter, self._limit = drafter, limit
        self._is_forced = is_forced
        self._predicted: list[int] = []
        self._at = 0
        self.drafted = self.accepted = 0

    def use_answers(self, answers: AnswerFile | None) -> None:
        """Draft from past answers too; None releases them."""
        if self._drafter is not None:
            self._drafter.answers = answers

    def propose(self, tokens: Sequence[int], room: int, budget: DraftBudget) -> list[int]:
        """Return the draft tokens of this step, at most `room`."""
        self._predicted = []
        drafter, limit = self._drafter, min(self._limit, room)
        if drafter is None or limit <= 0:
            return []
        if not (self._is_forced or budget.pays(limit)):
            return []
        self._at = len(tokens)
        self._predicted = drafter.draft(tokens, limit)
        if not self._is_forced:
            chances = [drafter.acceptance(i).rate for i in range(len(self._predicted))]
            limit = budget.take(chances)
        return self._predicted[:limit]

    def record_acceptance(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """Compare the prediction with the sampled `tokens`, and count the rows that were drafted."""
        self.drafted += drafted
        self.accepted += accepted
        for i, (predicted, token) in enumerate(zip(self._predicted, tokens[self._at :], strict=False)):
            assert self._drafter is not None
            self._drafter.acceptance(i).note(is_right=predicted == token)
            if predicted != token:
                break
