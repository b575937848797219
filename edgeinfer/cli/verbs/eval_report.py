"""The result of `edgeinfer eval`: scores with confidence intervals, and a Markdown report."""

from __future__ import annotations

import math

import msgspec

from edgeinfer.bench import markdown
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table

_Z = 1.96
#: Maximum number of characters of an answer in a report.
_SHOWN = 80
#: Maximum number of rows of a table; the web page shows longer ones as plain text.
_ROWS = 25


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an answer passed its item's check. `answer` is the text of the answer.

    `error` says why there is no verdict. `is_cut`: the answer reached the token limit. `logprobs` has
    the log-probability of each choice.
    """

    passed: bool = False
    answer: str = ""
    error: str = ""
    is_cut: bool = False
    logprobs: list[float] = []


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    check: str
    verdicts: list[Verdict]


class Interval(msgspec.Struct, frozen=True):
    """A share, or a difference of two shares, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def share(n: int, total: int) -> Interval:
    """Return the share `n / total`, with Wilson's score interval."""
    p, z2 = n / total, _Z * _Z
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half))


def paired_difference(first: int, second: int, total: int) -> Interval:
    """Return the second candidate's share of passed items minus the first candidate's.

    Of `total` items, `first` were passed only by the first candidate, `second` only by the second. The
    interval is Agresti's and Min's (Statistics in Medicine 24, 2005): Wald's interval for pairs, with
    half an item added to each of the four cells.
    """
    n, middle = total + 2, (second - first) / (total + 2)
    half = _Z * math.sqrt(((first + second + 1) / n - middle * middle) / n)
    return Interval((second - first) / total, max(-1.0, middle - half), min(1.0, middle + half))


class EvalResult(Result, frozen=True, kw_only=True):
    """Scores of the candidates on a set of items; `path` is the report.

    An item without an answer counts as not passed. `differences` compare each later candidate with the
    first.
    """

    set: str
    candidates: list[str]
    scores: list[Interval]
    differences: list[Interval]
    items: list[ItemResult]
    path: str

    @classmethod
    def of(cls, name: str, candidates: list[str], items: list[ItemResult], path: str) -> EvalResult:
        passed = [[item.verdicts[n].passed for item in items] for n in range(len(candidates))]
        pairs = [list(zip(passed[0], other, strict=True)) for other in passed[1:]]
        ones = [(rows.count((True, False)), rows.count((False, True))) for rows in pairs]
        return cls(
            set=name,
            candidates=candidates,
            scores=[share(sum(passes), len(items)) for passes in passed],
            differences=[paired_difference(*passes, len(items)) for passes in ones],
            items=items,
            path=path,
        )

    @property
    def exit_code(self) -> int:
        return int(any(verdict.error for item in self.items for verdict in item.verdicts))

    def human(self) -> str:
        rows = table(self._scores(), right=frozenset({1, 2}))
        return "\n\n".join([rows, *self._notes(), f"each answer: {self.path}"])

    def report(self) -> str:
        """Return the report as Markdown: scores, then the verdicts on every item."""
        rows = [[item.id, item.check, *map(_verdict_text, item.verdicts)] for item in self.items]
        head = ["item", "check", *self.candidates]
        parts = [[head, *rows[start : start + _ROWS]] for start in range(0, len(rows), _ROWS)]
        scores, *verdicts = map(_markdown, (self._scores(), *parts))
        return "\n\n".join([f"# {self.set}", scores, *self._notes(), *verdicts]) + "\n"

    def _scores(self) -> list[list[str]]:
        rows = [["candidate", "passed", "score", "95 % interval", "against the first"]]
        for n, (name, score) in enumerate(zip(self.candidates, self.scores, strict=True)):
            passed = f"{round(score.value * len(self.items))} of {len(self.items)}"
            interval = f"{score.low:.0%} – {score.high:.0%}"
            rows.append([name, passed, f"{score.value:.0%}", interval, self.compare_with_first(n)])
        return rows

    def compare_with_first(self, n: int) -> str:
        """Compare candidate `n` with the first: `+4% (+1% to +7%): better`; "" for the first itself."""
        if not n:
            return ""
        difference = self.differences[n - 1]
        verdict = "better" if difference.low > 0 else "no difference shown"
        verdict = "worse" if difference.high < 0 else verdict
        return f"{difference.value:+.0%} ({difference.low:+.0%} to {difference.high:+.0%}): {verdict}"

    def _notes(self) -> list[str]:
        verdicts = [verdict for item in self.items for verdict in item.verdicts]
        cut = sum(verdict.is_cut for verdict in verdicts)
        failed = [verdict.error for verdict in verdicts if verdict.error]
        limit = f"{cut} of {len(verdicts)} answers ended at their token limit (`--max-tokens`)."
        missing = f"{len(failed)} have no answer and count as not passed: {''.join(failed[:1])}"
        return [limit] * bool(cut) + [missing] * bool(failed)


def _cell(text: str) -> str:
    """Escape text of a model or user for a Markdown table cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _markdown(rows: list[list[str]]) -> str:
    head, *lines = ([_cell(text) for text in row] for row in rows)
    return markdown(head, lines)


def _verdict_text(verdict: Verdict) -> str:
    if verdict.passed:
        return "✓"
    text = verdict.error or verdict.answer.strip()
    return f"✗ {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}"
