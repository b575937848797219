"""Drift: compare the distributions of a model's requests and answers in two weeks.

A value ("aggregate", e.g. the length of answers) has moved if two statistics agree, as in Evidently
(github.com/evidentlyai/evidently, `calculations/stattests`):

- The population stability index, PSI = Σ (now - before) ln(now / before) over the shares of all bins
  (0.0001 for an empty one), is at least 0.1.
- The two-sample Kolmogorov-Smirnov test is significant. (Categories are taken in alphabetical order;
  for categories the test reports fewer false changes than the level allows.)

Unlike in Evidently, the level of significance is divided by the number of tests (Bonferroni). Requests
of one session are similar and not independent: therefore the sample size is divided by the variance
between days, relative to the variance by chance (design effect, Rao and Scott 1981).
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
    """The change of one value, whose name is `aggregate`, between two weeks.

    `psi` is the population stability index, `p` the p-value of the Kolmogorov-Smirnov test, and `moved`
    whether both show a change. `before` and `now` describe the weeks: a median, or a category's share.
    """

    aggregate: str
    psi: float
    p: float
    moved: bool
    before: str
    now: str


#: Probability that a comparison of two weeks without any change reports a change.
_LEVEL = 0.01
_PSI_DRIFT, _EMPTY = 0.1, 0.0001
#: Minimum number of days with answers, and of independent answers, that each of two weeks must have to
#: be compared. The number of independent answers is the number of all answers divided by the design
#: effect, because answers of one session are similar.
_MIN_DAYS, _MIN_ANSWERS = 3, 30.0


def compare_weeks(path: Path, before: date, now: date) -> dict[str, tuple[Change, ...]]:
    """Compare the weeks that end on `before` and `now`; return the changes of each model.

    `path` is the file of `daily_counts`. Raises StoreError if it cannot be read.
    """
    weeks = [read_week(path, last) for last in (before, now)]
    names = sorted(weeks[0].keys() | weeks[1].keys())
    return {name: compare(*(week.get(name, {}) for week in weeks)) for name in names}


def compare(before: Counts, now: Counts) -> tuple[Change, ...]:
    """Compare two weeks of a model. Values with too little data in one of them are left out.

    Changes that are significant (`moved`) come first, and among equals those with a larger PSI.
    """
    changes, names = [], sorted(before.keys() & now.keys())
    for name in names:
        days = [list(week[name].values()) for week in (before, now)]
        if min(map(len, days)) < _MIN_DAYS:
            continue
        bins: list[Any] = sorted({bin for week in days for day in week for bin in day})
        weeks = [np.array([[day[bin] for bin in bins] for day in week], float) for week in days]
        sizes = [week.sum() / _design_effect(weeks) for week in weeks]
        if min(sizes) < _MIN_ANSWERS:
            continue
        shares = [week.sum(0) / week.sum() for week in weeks]
        psi, p = _psi(bins, shares), _ks(shares, sizes[0] * sizes[1] / sum(sizes))
        # Bonferroni correction: multiply p by the number of all values, also of those without enough
        # data
        moved = psi >= _PSI_DRIFT and p * len(names) <= _LEVEL
        old, new = _describe_weeks(name, bins, shares)
        changes.append(Change(aggregate=name, psi=psi, p=p, moved=moved, before=old, now=new))
    return tuple(sorted(changes, key=lambda change: (not change.moved, -change.psi)))


def _design_effect(weeks: Sequence[Array]) -> float:
    """Return the design effect: variance between days, relative to the variance by chance; at least 1.

    The bins are divided at each position into low and high values, and the largest effect counts; a
    mean over all bins would hide that sessions differ in few bins. The result tends to be too large.
    """
    squares, freedom = np.zeros(weeks[0].shape[1]), 0
    for week in weeks:
        n_below, sizes = week.cumsum(1), week.sum(1, keepdims=True)
        share = n_below.sum(0) / sizes.sum()
        variance = np.maximum(sizes * share * (1 - share), 1e-9)
        squares += ((n_below - sizes * share) ** 2 / variance).sum(0)
        freedom += len(week) - 1
    # A variance that is estimated from few days may be too small, so it is multiplied by exp(7.3 /
    # freedom), an upper bound by the F distribution. With five days in each week (freedom 8), exp(3.5 /
    # freedom) was enough in simulations, because the largest of many estimates is taken.
    inflation = 3.5 if freedom >= 8 else 7.3
    return max(1.0, float(squares.max()) / freedom * math.exp(inflation / freedom))


def _psi(bins: Sequence[Bin], shares: Sequence[Array]) -> float:
    """Return the PSI over categories, or over pairs of bins (about as many as Sturges' rule gives)."""
    parts = [bin // 2 if isinstance(bin, int) else bin for bin in bins]
    _, groups = np.unique(parts, return_inverse=True)
    a, b = (np.maximum(np.bincount(groups, week), _EMPTY) for week in shares)
    return float(((b - a) * np.log(b / a)).sum())


def _ks(shares: Sequence[Array], size: float) -> float:
    """Return the p-value of the Kolmogorov-Smirnov test, which for binned values is too large."""
    distance = float(np.abs((shares[0] - shares[1]).cumsum()).max())
    scaled = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    if scaled < 0.3:  # the series converges only above this
        return 1.0
    terms = ((1 if j % 2 else -1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 20))
    return min(1.0, max(0.0, 2 * sum(terms)))


def _describe_weeks(name: str, bins: Sequence[Bin], shares: Sequence[Array]) -> list[str]:
    """Return a text for each week: the median, or the share of the category that changed most."""
    most = int(np.abs(shares[0] - shares[1]).argmax())
    if isinstance(bins[most], str):
        return [f"{bins[most]} {week[most]:.0%}" for week in shares]
    return [_bin_text(name, bins[int(week.cumsum().searchsorted(0.5))]) for week in shares]


def _bin_text(name: str, bin: Any) -> str:
    if name.endswith("_share"):
        return f"{min(1.0, (bin + 0.5) / SHARE_BINS):.0%}"
    if bin == bin_of(name, 0.0):
        return "0"
    value = 2 ** ((bin + 0.5) / BINS_PER_DOUBLING)
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"
