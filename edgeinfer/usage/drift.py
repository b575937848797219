"""Drift: find what changed in a model's requests and answers between two weeks.

The definitions are Evidently's (github.com/evidentlyai/evidently, `calculations/stattests`): PSI = Σ
(now - before) ln(now / before) over bins, an empty one being 0.0001, with drift from 0.1 on; and the
two-sample Kolmogorov-Smirnov test, here also for categories in alphabetical order, for which it is
conservative. An aggregate has moved if both agree. Unlike in Evidently, all tests of a comparison share
one level (Bonferroni), and the sample size is divided by the variation between days beyond chance (Rao
and Scott 1981), because the requests of one session are similar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer.usage.daily_counts import BINS_PER_DOUBLING, SHARE_BINS, Bin, Counts, bin_of, read_week

Array = npt.NDArray[np.float64]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The change of an aggregate between two weeks: PSI, the test's p-value, both typical values."""

    aggregate: str
    psi: float
    p: float
    moved: bool
    before: str
    now: str


#: Probability of reporting any change between two equal weeks.
_LEVEL = 0.01
_PSI_DRIFT, _EMPTY = 0.1, 0.0001
#: Least number of days in each week, and of independent answers, to compare an aggregate.
_LEAST_DAYS, _LEAST_ANSWERS = 3, 30.0


def compare_weeks(path: Path, before: date, now: date) -> dict[str, tuple[Change, ...]]:
    """Compare the weeks that end on two days, by model, if both have data. Raises StoreError."""
    weeks = [read_week(path, last) for last in (before, now)]
    names = sorted(weeks[0].keys() | weeks[1].keys())
    return {name: compare(*(week.get(name, {}) for week in weeks)) for name in names}


def compare(before: Counts, now: Counts) -> tuple[Change, ...]:
    """Compare the aggregates with enough data in both weeks; moved ones first, then by PSI."""
    changes, names = [], sorted(before.keys() & now.keys())
    for name in names:
        days = [list(week[name].values()) for week in (before, now)]
        if min(map(len, days)) < _LEAST_DAYS:
            continue
        bins: list[Any] = sorted({bin for week in days for day in week for bin in day})
        weeks = [np.array([[day[bin] for bin in bins] for day in week], float) for week in days]
        sizes = [week.sum() / _spread(weeks) for week in weeks]
        if min(sizes) < _LEAST_ANSWERS:
            continue
        shares = [week.sum(0) / week.sum() for week in weeks]
        psi, p = _psi(bins, shares), _ks(shares, sizes[0] * sizes[1] / sum(sizes))
        # divide by all names: the spread of those with enough answers may be underestimated
        moved = psi >= _PSI_DRIFT and p * len(names) <= _LEVEL
        was, is_now = _typical(name, bins, shares)
        changes.append(Change(aggregate=name, psi=psi, p=p, moved=moved, before=was, now=is_now))
    return tuple(sorted(changes, key=lambda change: (not change.moved, -change.psi)))


def _spread(weeks: Sequence[Array]) -> float:
    """Return how much more the days of a week differ than by chance, at least 1, erring upwards.

    It is the largest value over all divisions of the bins into two counts: sessions differ in few
    directions, which a mean over all bins would miss.
    """
    squares, freedom = np.zeros(weeks[0].shape[1]), 0
    for week in weeks:
        below, sizes = week.cumsum(1), week.sum(1, keepdims=True)
        share = below.sum(0) / sizes.sum()
        variance = np.maximum(sizes * share * (1 - share), 1e-9)
        squares += ((below - sizes * share) ** 2 / variance).sum(0)
        freedom += len(week) - 1
    # F(1, freedom) would need exp(7.3 / freedom). But the largest of many values is too large, so half
    # of that is enough in simulations, if the weeks have five days
    inflation = 3.5 if freedom >= 8 else 7.3
    return max(1.0, float(squares.max()) / freedom * math.exp(inflation / freedom))


def _psi(bins: Sequence[Bin], shares: Sequence[Array]) -> float:
    """Return the PSI over categories, or pairs of bins: Sturges' rule suggests about that number."""
    parts = [bin // 2 if isinstance(bin, int) else bin for bin in bins]
    _, groups = np.unique(parts, return_inverse=True)
    a, b = (np.maximum(np.bincount(groups, week), _EMPTY) for week in shares)
    return float(((b - a) * np.log(b / a)).sum())


def _ks(shares: Sequence[Array], size: float) -> float:
    """Return the p-value of the two-sample test, which is conservative for bins."""
    distance = float(np.abs((shares[0] - shares[1]).cumsum()).max())
    scaled = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    if scaled < 0.3:  # the sum below does not converge there
        return 1.0
    terms = ((1 if j % 2 else -1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 20))
    return min(1.0, max(0.0, 2 * sum(terms)))


def _typical(name: str, bins: Sequence[Bin], shares: Sequence[Array]) -> list[str]:
    """Describe both weeks: the median, or the share of the category that changed most."""
    most = int(np.abs(shares[0] - shares[1]).argmax())
    if isinstance(bins[most], str):
        return [f"{bins[most]} {week[most]:.0%}" for week in shares]
    return [_middle(name, bins[int(week.cumsum().searchsorted(0.5))]) for week in shares]


def _middle(name: str, bin: Any) -> str:
    if name.endswith("_share"):
        return f"{min(1.0, (bin + 0.5) / SHARE_BINS):.0%}"
    if bin == bin_of(name, 0.0):
        return "0"
    value = 2 ** ((bin + 0.5) / BINS_PER_DOUBLING)
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"
