"""`edgeinfer eval SET MODEL…`: score models on a set of items, beside each other."""

from __future__ import annotations

import argparse
import math

import msgspec

from edgeinfer.bench import markdown
from edgeinfer.cli.options import SYSTEM, add_attached_options, add_load_options, add_quiet, count
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.host import Host

_Z = 1.96
#: An answer in a report is cut to this (characters).
_SHOWN = 80
#: Items of one table: the page renders no longer block.
_ROWS = 25


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


class Interval(msgspec.Struct, frozen=True):
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


def paired_difference(first: int, second: int, total: int) -> Interval:
    """Return how much more often the second passes, of `total` items that only one or the other passes.

    Agresti and Min's interval (Statistics in Medicine 24, 2005): Wald's of the pairs, with half an item
    more in each of their four cells.
    """
    n, middle = total + 2, (second - first) / (total + 2)
    half = _Z * math.sqrt(((first + second + 1) / n - middle * middle) / n)
    return Interval((second - first) / total, max(-1.0, middle - half), min(1.0, middle + half))


class EvalResult(Result, frozen=True, kw_only=True):
    """The verdicts on a set. `path` is the report.

    `scores` are shares of the items; one without an answer is not passed. `differences` are those of
    each later candidate from the first, item by item.
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
            scores=[share(sum(one), len(items)) for one in passed],
            differences=[paired_difference(*one, len(items)) for one in ones],
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
        """Return the report in Markdown: the scores, and every item's verdicts."""
        rows = [[one.id, one.check, *map(_shown, one.verdicts)] for one in self.items]
        head = ["item", "check", *self.candidates]
        parts = [[head, *rows[at : at + _ROWS]] for at in range(0, len(rows), _ROWS)]
        tables = [[[_cell(text) for text in row] for row in part] for part in (self._scores(), *parts)]
        scores, *verdicts = (markdown(one[0], one[1:]) for one in tables)
        return "\n\n".join([f"# {self.set}", scores, *self._notes(), *verdicts]) + "\n"

    def _scores(self) -> list[list[str]]:
        rows = [["candidate", "passed", "score", "95 % interval", "beside the first"]]
        for n, (name, score) in enumerate(zip(self.candidates, self.scores, strict=True)):
            passed = f"{round(score.value * len(self.items))} of {len(self.items)}"
            interval = f"{score.low:.0%} – {score.high:.0%}"
            rows.append([name, passed, f"{score.value:.0%}", interval, self.beside(n)])
        return rows

    def beside(self, n: int) -> str:
        """Describe the difference of candidate `n` from the first; "" of the first itself."""
        if not n:
            return ""
        difference = self.differences[n - 1]
        verdict = "better" if difference.low > 0 else "no difference shown"
        verdict = "worse" if difference.high < 0 else verdict
        return f"{difference.value:+.0%} ({difference.low:+.0%} to {difference.high:+.0%}): {verdict}"

    def _notes(self) -> list[str]:
        verdicts = [verdict for item in self.items for verdict in item.verdicts]
        cut = sum(one.is_cut for one in verdicts)
        failed = [one.error for one in verdicts if one.error]
        limit = f"{cut} of {len(verdicts)} answers ended at their token limit (`--max-tokens`)."
        missing = f"{len(failed)} have no answer and count as not passed: {''.join(failed[:1])}"
        return [limit] * bool(cut) + [missing] * bool(failed)


def _cell(text: str) -> str:
    """Keep a text of a model or a user from ending its cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _shown(verdict: Verdict) -> str:
    if verdict.passed:
        return "✓"
    text = verdict.error or verdict.answer.strip()
    return f"✗ {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "set", metavar="SET.jsonl", help="items, one a line; `basics` is the set shipped here"
    )
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="models or GGUF files; the first is the baseline"
    )
    add_option(parser, "--system TEXT|@FILE...", f"{SYSTEM}; each is a candidate")
    add_option(
        parser,
        "--adapter ADAPTER|FILE[:SCALE]...",
        "LoRA adapter of the model, or none; each is a candidate",
    )
    add_option(parser, "--judge MODEL", "the model that decides items with `judge`")
    add_option(parser, "--max-tokens N", "at most N tokens an answer (512)", type=count, default=512)
    parser.add_argument("--think", choices=("on", "off"), help="reason first, if the model can")
    add_quiet(parser)
    add_load_options(parser)
    add_attached_options(parser.add_argument_group(LAUNCH))


def run(options: argparse.Namespace, host: Host) -> EvalResult:
    """Score models on a set. Raises what `evaluating.evaluate` raises."""
    from edgeinfer.cli.evaluating import evaluate  # 240 ms: the server, which `--help` does not need

    return evaluate(options, host)
