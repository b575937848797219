"""`edgeinfer eval SET MODEL…`: score models on a set of items, beside each other."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import msgspec

from edgeinfer.cli.options import SYSTEM, add_attached_options, add_load_options, add_quiet, count
from edgeinfer.cli.parser import LAUNCH
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.host import Host

_Z = 1.96
#: An answer in a report is cut to this (characters).
_SHOWN = 80


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an answer passed. `error`: there is none. `is_cut`: it ended at the token limit.

    `logprobs` are those of the choices.
    """

    passed: bool = False
    answer: str = ""
    error: str = ""
    is_cut: bool = False
    logprobs: list[float] = []


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """An item with a verdict for each candidate, in order."""

    id: str
    check: str
    verdicts: list[Verdict]


class Interval(NamedTuple):
    """A share, or a difference of two, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def share(n: int, total: int) -> Interval:
    """Return `n` of `total` with Wilson's score interval."""
    p, z2 = n / total, _Z * _Z
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half))


def paired_difference(both: int, first: int, second: int, neither: int) -> Interval:
    """Return how much more often the second passes, of items that `both`, only one, or `neither` pass.

    Newcombe's method 10 (Statistics in Medicine 17, 1998): Wilson's intervals, and the correlation of
    the pairs with its continuity correction.
    """
    total = both + first + second + neither
    one, two = share(both + first, total), share(both + second, total)
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    phi = (max(0.0, excess - total / 2) if excess > 0 else excess) / math.sqrt(product or 1)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = two.value - one.value
    return Interval(
        difference,
        difference - reach(two.value - two.low, one.high - one.value),
        difference + reach(two.high - two.value, one.value - one.low),
    )


class EvalResult(Result, frozen=True, kw_only=True):
    """The verdicts on a set. `path` is the report; the first candidate is the others' baseline."""

    set: str
    candidates: list[str]
    items: list[ItemResult]
    path: str = ""

    @property
    def exit_code(self) -> int:
        return int(any(verdict.error for item in self.items for verdict in item.verdicts))

    def passed(self, n: int) -> list[bool]:
        return [item.verdicts[n].passed for item in self.items]

    def score(self, n: int) -> Interval:
        """Return the share of items that candidate `n` passes; one without an answer is not passed."""
        return share(sum(self.passed(n)), len(self.items))

    def difference(self, n: int) -> Interval:
        """Return candidate `n` minus the baseline, item by item."""
        pairs = list(zip(self.passed(0), self.passed(n), strict=True))
        cells = ((True, True), (True, False), (False, True), (False, False))
        return paired_difference(*map(pairs.count, cells))

    def human(self) -> str:
        rows = table(self._scores(), right=frozenset({1, 2}))
        return "\n\n".join([rows, *self._notes(), f"each answer: {self.path}"])

    def report(self) -> str:
        """Return the report in Markdown: the scores, and every item's verdicts."""
        rows = [["item", "check", *self.candidates]]
        for item in self.items:
            rows.append([item.id, item.check, *map(_cell, item.verdicts)])
        parts = [f"# {self.set}", _markdown(self._scores()), *self._notes(), _markdown(rows)]
        return "\n\n".join(parts) + "\n"

    def _scores(self) -> list[list[str]]:
        rows = [["candidate", "passed", "score", "95 % interval", "beside the first"]]
        for n, name in enumerate(self.candidates):
            score = self.score(n)
            passed = f"{sum(self.passed(n))} of {len(self.items)}"
            interval = f"{score.low:.0%} – {score.high:.0%}"
            rows.append([name, passed, f"{score.value:.0%}", interval, self.beside(n)])
        return rows

    def beside(self, n: int) -> str:
        """Describe the difference of candidate `n` from the first; "" of the first itself."""
        if not n:
            return ""
        found = self.difference(n)
        verdict = "better" if found.low > 0 else "no difference shown"
        verdict = "worse" if found.high < 0 else verdict
        return f"{found.value:+.0%} ({found.low:+.0%} to {found.high:+.0%}): {verdict}"

    def _notes(self) -> list[str]:
        verdicts = [verdict for item in self.items for verdict in item.verdicts]
        cut = sum(one.is_cut for one in verdicts)
        failed = [one.error for one in verdicts if one.error]
        notes = []
        if cut:
            notes.append(
                f"{cut} of {len(verdicts)} answers ended at their token limit (`--max-tokens`)."
            )
        if failed:
            notes.append(f"{len(failed)} have no answer and count as not passed: {failed[0]}")
        return notes


def _cell(verdict: Verdict) -> str:
    if verdict.passed:
        return "✓"
    text = verdict.error or verdict.answer.strip()
    return f"✗ {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}"


def _markdown(rows: list[list[str]]) -> str:
    """Write a table; texts of models and users are one line, and end no cell."""
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "set", metavar="SET.jsonl", help="items, one a line; `basics` is the set shipped here"
    )
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="models or GGUF files; the first is the baseline"
    )
    parser.add_argument(
        "--system",
        action="append",
        default=[],
        metavar="TEXT|@FILE",
        help=f"{SYSTEM}; each is a candidate",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="ADAPTER|FILE[:SCALE]",
        help="LoRA adapter of the model, or none; each is a candidate",
    )
    parser.add_argument("--judge", metavar="MODEL", help="the model that decides items with `judge`")
    parser.add_argument(
        "--max-tokens", type=count, default=512, metavar="N", help="at most N tokens an answer (512)"
    )
    parser.add_argument("--think", choices=("on", "off"), help="reason first, if the model can")
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="requests run at once (default: chosen automatically)",
    )
    add_quiet(parser)
    add_load_options(parser)
    add_attached_options(parser.add_argument_group(LAUNCH))


def run(options: argparse.Namespace, host: Host) -> EvalResult:
    """Score models on a set. Raises what `evaluating.evaluate` raises."""
    from edgeinfer.cli.evaluating import evaluate  # 240 ms: the server, which `--help` does not need

    return evaluate(options, host)
