"""`edgeinfer drift`: compare a model's answers in one week with those in another."""

from __future__ import annotations

import argparse
from datetime import date, timedelta
from typing import TYPE_CHECKING

from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost

if TYPE_CHECKING:
    from edgeinfer.usage.drift import Change


class DriftResult(Result, frozen=True, kw_only=True):
    """Changes in the answers of each model, from the week that ends on `against` to that of `until`.

    `against` and `until` are ISO dates.
    """

    until: str
    against: str
    models: dict[str, tuple[Change, ...]]

    @property
    def exit_code(self) -> int:
        return int(any(change.moved for changes in self.models.values() for change in changes))

    def human(self) -> str:
        parts = [self._part(model, changes) for model, changes in self.models.items()]
        weeks = f"the weeks that end on {self.against} and {self.until}"
        return "\n\n".join(parts) or f"no answers were recorded in {weeks}"

    def _part(self, model: str, changes: tuple[Change, ...]) -> str:
        head = f"{model}, week to {self.until} compared with week to {self.against}: "
        moved = [change for change in changes if change.moved]
        if moved:
            return f"{head}\n{table([_HEAD, *map(_row, moved)])}"
        if changes:
            return f"{head}none of {len(changes)} values changed"
        return f"{head}not enough answers (about 30 on at least 3 days are needed)"


_HEAD = ("MOVED", "BEFORE", "NOW", "PSI", "P")


def _row(change: Change) -> tuple[str, ...]:
    name = change.aggregate.replace("_", " ")
    return name, change.before, change.now, f"{change.psi:.2f}", f"{change.p:.0e}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this model (default: all)")
    add_option(parser, "--until DAY", "last day of the week, YYYY-MM-DD (default: today)", type=_day)
    add_option(parser, "--against DAY", "the other week's last day (default: 7 days before)", type=_day)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date; use YYYY-MM-DD") from None


def run(options: argparse.Namespace, host: EngineHost) -> DriftResult:
    """Compare two weeks; exit status 1 if something changed. Raises UsageError if the weeks overlap."""
    # slow import: numpy takes 80 ms
    from edgeinfer.usage.daily_counts import drift_path
    from edgeinfer.usage.drift import compare_weeks

    until = options.until or date.today()
    against = options.against or until - timedelta(7)
    if abs(until - against) < timedelta(7):
        overlap = f"the weeks that end on {against} and {until} overlap"
        raise UsageError(overlap, hint="give days that are at least 7 days apart")
    models = compare_weeks(drift_path(), against, until)
    if options.model:
        from edgeinfer.models.reference import resolve  # slow import: 30 ms

        name = options.model if options.model in models else resolve(options.model).name
        if name not in models:
            off = "" if host.config.drift.record else "; drift.record is off in config.toml"
            weeks = f"the weeks that end on {against} and {until}"
            problem = f"no answers of {name} were recorded in {weeks}{off}"
            raise UsageError(problem, hint="`edgeinfer drift` shows all models")
        models = {name: models[name]}
    return DriftResult(until=f"{until}", against=f"{against}", models=models)
