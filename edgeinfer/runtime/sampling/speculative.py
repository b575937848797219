"""Speculative decoding: draft tokens, and verify them in one step, as long as that saves time.

A draft token is accepted only if the sampler picks the same token from the model's logits. So the text
is the same with and without drafts; only the time differs. Drafts come from the text itself, from past
answers, and from a draft model.

Costs are in steps of one row, where a row is a token in a batch. A draft is a list of runs: a draft
token, and the tokens that the request's grammar forces after it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import numpy as np

from edgeinfer.runtime.sampling.grammar import TokenMatcher
from edgeinfer.runtime.sampling.past_answers import (
    CONTEXT_TOKENS,
    LONGEST,
    AnswerFile,
    Tokens,
    common_suffix,
)

#: Maximum number of draft tokens that a step verifies for one sequence.
MAX_DRAFT = 15
#: Batch sizes (rows) with a known step cost; other costs are interpolated. `measure` measures all sizes
#: but the largest, because its logits would stay in memory and make snapshots larger. The largest
#: size's cost is extrapolated, and corrected by real steps.
_ROWS = (1, 2, 4, 8, 16, 32)
#: Costs assumed before the first measurement: two to three times those of edgeinfer's kernels.
_ASSUMED = (1.0, 1.35, 2.0, 3.3, 6.0, 11.5)
#: How long (s) `measure` measures the costs of steps.
_MEASURE_S = 0.7
#: Weight of a step without drafts in the moving average of the time of such steps.
_PLAIN_WEIGHT = 0.1
#: Weight of two slow corrections: a step with drafts corrects the average time of steps without drafts,
#: and a step without drafts lowers the cost of the largest batch if it exceeds the extrapolated one.
_DRIFT = 0.03
#: Least weight of a step with drafts in a measured cost. In a cost that is assumed or extrapolated, the
#: first such step has the weight 1.0.
_CURVE_WEIGHT = 0.08
#: Tokens are drafted only if they should gain this many times their cost, because times are noisy.
_MARGIN = 1.3


class StepCurve:
    """Learns how the time of a decode-only step depends on its number of rows (tokens).

    A cost is a time relative to a step of one row, because a longer context and other programs slow all
    steps alike. `logits_share` (0 to 1) is the part of a row's time that logits take; rows of forced
    tokens have no logits. `shared_share` (0 to 1) is the part of a step's time that, until the first
    measurement, is assumed not to depend on the number of rows.
    """

    def __init__(self, logits_share: float = 0.0, shared_share: float = 0.0) -> None:
        self._logits_share = logits_share
        self._points = [shared_share + (1.0 - shared_share) * cost for cost in _ASSUMED]
        self._weights = [1.0] * len(_ROWS)
        self._plain_s: dict[int, float] = {}

    def measure(self, step_s: Callable[[int], float]) -> None:
        """Measure costs. `step_s(rows)` runs a step with `rows` rows and returns its time (s)."""
        measured = _ROWS[:-1]
        best, until = [math.inf] * len(measured), time.monotonic() + _MEASURE_S
        while math.inf in best or time.monotonic() < until:
            best = [min(seconds, step_s(rows)) for seconds, rows in zip(best, measured, strict=True)]
        best = [min(best[i:]) for i in range(len(best))]  # more rows never take less time
        self._points = [seconds / best[0] for seconds in (*best, _extrapolate(best))]
        self._weights = [_CURVE_WEIGHT] * len(measured) + [1.0]
        self._plain_s = {1: best[0]}

    def record(self, n_sequences: int, n_rows: int, seconds: float, n_forced: int = 0) -> None:
        """Learn from a step that took `seconds`.

        `n_rows` includes draft tokens, and the `n_forced` tokens that constraints force.
        """
        rows, is_plain = n_rows - self._logits_share * n_forced, n_rows == n_sequences
        expected_s = self.seconds(n_sequences, rows)
        if expected_s is None:
            if is_plain:
                self._plain_s[n_sequences] = seconds
            return
        change = min(max(seconds / expected_s, 0.5), 2.0) - 1.0  # limit outliers
        if is_plain:
            self._plain_s[n_sequences] *= 1.0 + _PLAIN_WEIGHT * change
            # lower too high a cost, because such a cost prevents the long drafts that would correct it
            excess = self._points[-1] - _extrapolate(self._points[:-1])
            self._points[-1] -= _DRIFT * self._weights[-1] * max(0.0, excess)
            return
        self._plain_s[n_sequences] *= 1.0 + _DRIFT * change
        i = _segment(rows)
        share = min(1.0, (rows - _ROWS[i - 1]) / (_ROWS[i] - _ROWS[i - 1]))
        points, shares = list(self._points), {i - 1: 1.0 - share, i: share}
        for j, weight in enumerate(self._weights):
            if _ROWS[j] <= n_sequences or not (j in shares or weight == 1.0):
                continue  # this step says nothing about the measured costs of other numbers of rows
            points[j] *= 1.0 + change * weight * shares.get(j, 0.5) / (1.0 + weight)
            if shares.get(j):
                self._weights[j] = max(_CURVE_WEIGHT, weight / (1.0 + weight))
        self._points = list(accumulate(points, max))  # more rows never take less time

    def seconds(self, n_sequences: int, rows: float) -> float | None:
        """Estimate the time (s) of a step with `rows`; None before any step of `n_sequences`."""
        plain_s = self._plain_s.get(n_sequences)
        return None if plain_s is None else plain_s * self.cost(rows) / self.cost(n_sequences)

    def cost(self, rows: float) -> float:
        """Return the cost of a step with `rows` rows."""
        i = _segment(rows)
        slope = (self._points[i] - self._points[i - 1]) / (_ROWS[i] - _ROWS[i - 1])
        return self._points[i - 1] + slope * (rows - _ROWS[i - 1])


def _extrapolate(points: Sequence[float]) -> float:
    """Return the cost of twice as many rows as the last of `points`, by a line through the last two."""
    return points[-1] + 2 * (points[-1] - points[-2])


def _segment(rows: float) -> int:
    return min(max(1, bisect_left(_ROWS, rows)), len(_ROWS) - 1)


class DraftBudget:
    """Decides how many draft tokens of each sequence the next step verifies.

    Maximizes the expected tokens per time. Tokens that a grammar forces are rows of the step, but count
    neither as gain nor as cost.
    """

    def __init__(self, curve: StepCurve, n_sequences: int, rows: int) -> None:
        self._row_cost, self._rows = curve.cost, float(rows)
        #: Cost of the step with its drafts so far; the unit is the cost of a step with one row.
        self.cost = curve.cost(n_sequences)
        #: Number of tokens that the step is expected to give.
        self._expected = float(n_sequences)
        #: Time (s) of a step with one row; 0 before the first measurement.
        self.row_s = curve.seconds(n_sequences, 1) or 0.0
        #: Lowest cost per row if the step gets 1 to MAX_DRAFT more rows; None until it is computed.
        self._least_row: float | None = None if self.row_s else math.inf
        #: Time (s) that a draft model took for this step.
        self.model_s = 0.0

    @property
    def rate(self) -> float:
        """Expected tokens in the time that a step of one row takes."""
        return self._expected / self.cost

    def best(self, runs: Sequence[Run]) -> tuple[int, float]:
        """Return how many `runs` of a sequence to verify for the highest `rate`, and that rate."""
        best, best_rate = 0, self.rate
        for n, (gain, cost, _) in enumerate(self.totals(runs), 1):
            total = (self._expected + gain) / (self.cost + cost)
            if total > best_rate and gain * self.cost > _MARGIN * cost * self._expected:
                best, best_rate = n, total
        return best, best_rate

    def totals(self, runs: Sequence[Run]) -> Iterator[tuple[float, float, float]]:
        """Yield (gain, cost, rows) for the first run, for the first two runs, and so on.

        The runs add `gain` (expected tokens) and `cost` to the step; `rows` is the step's new total.
        Forced tokens after an accepted token cost nothing: without drafts they are computed, too.
        """
        gain, chance = 0.0, 1.0
        rows, draft_cost = self._rows, 0.0
        cost_before = self._row_cost(rows)
        for run in runs:
            chance *= run.acceptance.rate
            gain += chance
            draft_cost += run.draft_cost
            rows += 1 + (len(run.tokens) - 1) * (1.0 - chance)
            yield gain, self._row_cost(rows) - cost_before + draft_cost, rows

    def take(self, runs: list[Run]) -> list[Run]:
        """Add the runs that `best` chooses to the step, and return these runs."""
        n, _ = self.best(runs)
        if n:
            *_, (gain, cost, self._rows) = self.totals(runs[:n])
            self._expected += gain
            self.cost += cost
            self._least_row = None
        return runs[:n]

    @property
    def least_chance(self) -> float:
        """Least acceptance rate of the first draft token with which drafts can save time.

        Later draft tokens are assumed to be accepted.
        """
        if self._least_row is None:
            cost, rows = self._row_cost, self._rows
            self._least_row = min((cost(rows + i) - cost(rows)) / i for i in range(1, MAX_DRAFT + 1))
        return _MARGIN * self._least_row * self._expected / self.cost


#: Drafts are grouped by the length of their match (tokens): the minimum length of each group, and its
#: acceptance rate assumed before the first verification.
_LENGTHS = (2, 3, 4, 6, 9, 16, 32)
_START = (0.3, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95)
#: The acceptance rate assumed at first counts as this many verified tokens.
_START_TOKENS = 7
#: Minimum weight of one verified token in the moving average of an acceptance rate.
_LEAST_WEIGHT = 0.04


class Acceptance:
    """Moving average of the acceptance rate of draft tokens. Tokens after a wrong one do not count.

    `start` is the rate assumed at first. It has the weight of `n_tokens` verified tokens.
    """

    def __init__(self, start: float, n_tokens: int = _START_TOKENS) -> None:
        self.rate, self._n = start, n_tokens

    def record(self, *, is_right: bool) -> None:
        self._n += 1
        self.rate += max(_LEAST_WEIGHT, 1.0 / self._n) * (is_right - self.rate)


class Run(NamedTuple):
    """A draft token, and the tokens that the request's grammar forces after it.

    `draft_cost` is the cost of drafting the token, in steps of one row; 0.0 if it is drafted already.
    """

    tokens: Sequence[int]
    acceptance: Acceptance
    draft_cost: float = 0.0


def join(runs: Sequence[Run]) -> list[int]:
    return [token for run in runs for token in run.tokens]


def update_rates(runs: Sequence[Run], sampled: Sequence[int], *means: Acceptance) -> int:
    """Update the acceptance rates of a draft's runs, and `means`, from the `sampled` tokens.

    Each run up to the first wrong one is recorded. Return how many runs are right.
    """
    n_right = 0
    for run in runs:
        if not sampled:
            break
        is_right = run.tokens[0] == sampled[0]
        for acceptance in (run.acceptance, *means):
            acceptance.record(is_right=is_right)
        n_right += is_right
        sampled = sampled[len(run.tokens) :] if is_right else ()
    return n_right


class SuffixDrafter:
    """Drafts by lookup: searches the text, and past `answers`, for the longest match with the end of
    the text, and drafts the tokens that followed there. Of equally long matches, the latest counts.
    """

    def __init__(self, n_vocab: int) -> None:
        self.answers: AnswerFile | None = None
        self._n_vocab = n_vocab
        self._rates = [[Acceptance(start) for start in _START] for _ in range(2)]
        self._text: Tokens = np.empty(0, np.int32)
        self._n = self._next = 0
        #: The latest match with the end of the text: whether a past answer contains the match, the
        #: index at which the match ends there, and the match's length (tokens).
        self._is_past = False
        self._index = self._length = 0

    def draft(self, tokens: Sequence[int], limit: int, least_chance: float = 0.0) -> list[int]:
        """Return up to `limit` tokens; none if the end of `tokens` never occurred before. If the first
        token's acceptance rate is below `least_chance`, return only that token, to update the rate.
        """
        n_known = self._n if self._n <= len(tokens) else 0  # a context shift shortens the text
        if n_known and len(tokens) < self._next:
            return []
        self._append(tokens, n_known)
        if not (n_known and self._follows(n_known)):
            self._search()
        self._next = self._n + max(1, self._min_match_length(least_chance) - self._length)
        if self._length < _LENGTHS[0] or limit <= 0:
            return []
        if self.acceptance(0).rate < least_chance:
            limit = 1
        if self._is_past:
            assert self.answers is not None
            draft = self.answers.read(self._index, limit).tolist()
        else:
            draft = self._text[self._index : min(self._index + limit, self._n)].tolist()
            draft = (draft * limit)[:limit]  # a repetitive text: repeat the draft, too
        return list(takewhile(lambda token: 0 <= token < self._n_vocab, draft))

    def _min_match_length(self, least_chance: float) -> int:
        """Return the least length of a match that pays. As a match grows by one token per step, the
        search can pause; in every step of eight streams it takes 1 % of a 135M model's time.
        """
        rates = zip(_LENGTHS, *self._rates, strict=True)
        paying = (n for n, *groups in rates if max(r.rate for r in groups) >= least_chance)
        return min(next(paying, CONTEXT_TOKENS), CONTEXT_TOKENS)

    def _append(self, tokens: Sequence[int], n_known: int) -> None:
        if len(tokens) > len(self._text):
            grown = np.empty(len(tokens) * 2, np.int32)
            grown[:n_known] = self._text[:n_known]
            self._text = grown
        self._text[n_known : len(tokens)] = tokens[n_known:]
        self._n = len(tokens)

    def _follows(self, n_known: int) -> bool:
        """Return whether the text continues as the last match did, and the match is long enough."""
        if not self._length:
            return False
        n_new = self._n - n_known
        if self._is_past and self.answers:
            expected = self.answers.read(self._index, n_new)
        else:
            expected = self._text[self._index : self._index + n_new]
        if not np.array_equal(expected, self._text[n_known : self._n]):
            return False
        self._index += n_new
        self._length += n_new
        return self._length >= CONTEXT_TOKENS

    def _search(self) -> None:
        self._is_past = False
        self._index, self._length = self._find_in_text()
        if self.answers is not None and self._length < CONTEXT_TOKENS:
            index, length = self.answers.find(self._text[: self._n])
            if length > self._length:
                self._is_past = True
                self._index, self._length = index, length

    def _find_in_text(self) -> tuple[int, int]:
        text, n = self._text, self._n
        ends, length = (text[: n - 1] == text[n - 1]).nonzero()[0] + 1, 1
        if not len(ends):
            return 0, 0
        while len(ends) > 1 and length < LONGEST:
            longer = ends[ends > length]
            longer = longer[text[longer - 1 - length] == text[n - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        index = int(ends[-1])
        return index, common_suffix(text[:index], text[:n])

    def acceptance(self, position: int) -> Acceptance:
        """Return the acceptance rate to expect of the token at index `position` of the latest draft."""
        length = max(self._length + position, _LENGTHS[0])
        return self._rates[self._is_past][bisect_right(_LENGTHS, length) - 1]


class Drafting:
    """Drafts tokens for one sequence, from its text. `matcher` parses the request's constraint.

    `is_forced`: the request demands drafts at any cost. Without a `drafter`, nothing is drafted.
    """

    def __init__(
        self,
        drafter: SuffixDrafter | None,
        matcher: TokenMatcher | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self._drafter, self._matcher = drafter, matcher
        self._is_forced = is_forced
        self._text_runs: list[Run] = []
        self.drafted = self.accepted = 0

    def use_answers(self, answers: AnswerFile | None) -> None:
        """Also draft from past answers; None releases them."""
        if self._drafter is not None:
            self._drafter.answers = answers

    def close(self) -> None:
        """Release past answers. Idempotent."""
        self.use_answers(None)

    def propose(self, tokens: Sequence[int], room: int, budget: DraftBudget) -> list[int]:
        """Return up to `room` draft tokens for this step; [] if there are none, or none would pay."""
        drafter, limit = self._drafter, min(MAX_DRAFT, room)
        if drafter is None or limit <= 0:
            return []
        least_chance = 0.0 if self._is_forced else budget.least_chance
        if least_chance > 1.0:
            return []
        draft = drafter.draft(tokens, limit, least_chance)
        parts = self._matcher.runs(draft) if self._matcher is not None else [[token] for token in draft]
        starts = accumulate(map(len, parts), initial=0)
        runs = [Run(p, drafter.acceptance(i)) for p, i in zip(parts, starts, strict=False)]
        self._text_runs = runs
        if not self._is_forced:
            runs = self._take_runs(runs, tokens, limit, budget)
        return join(runs)[:limit]

    def _take_runs(
        self, text_runs: list[Run], tokens: Sequence[int], limit: int, budget: DraftBudget
    ) -> list[Run]:
        """Add runs of the draft from the text, or of a better one, to the step; return these runs."""
        return budget.take(text_runs)

    def record(self, sampled: Sequence[int], *, n_drafted: int, n_accepted: int) -> None:
        """Update the acceptance rates by comparing the last draft with the `sampled` tokens."""
        self.drafted += n_drafted
        self.accepted += n_accepted
        update_rates(self._text_runs, sampled)
        self._text_runs = []
