"""`edgeinfer ps`: list running processes and what they have cached; `--usage` shows usage by day."""

from __future__ import annotations

import argparse
from datetime import date, timedelta
from typing import TYPE_CHECKING

from edgeinfer.cli.options import add_everywhere
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.host import EngineHost
from edgeinfer.snapshots.running import RunningLaunch, processes
from edgeinfer.units import format_bytes, format_duration

if TYPE_CHECKING:
    from edgeinfer.usage.daily_counts import DayOfUse

_USAGE_DAYS = 30


class PsResult(Result, frozen=True, kw_only=True):
    """This user's running processes with this data folder, or with any folder (`--everywhere`)."""

    running: tuple[RunningLaunch, ...]

    def human(self) -> str:
        if not self.running:
            return "nothing is running"
        rows = [("PID", "AGE", "PRIVATE", "SHARED", "SNAPSHOT", "COMMAND"), *map(_row, self.running)]
        reports = "\n".join(f"{run.pid} {report}" for run in self.running for report in _reports(run))
        return "\n\n".join(filter(None, (table(rows), reports)))


def _reports(process: RunningLaunch) -> list[str]:
    lines = [f"{replica.model}: {replica.summary}" for replica in process.replicas]
    lines += [f"{layers.model}: layers on GPUs: {layers.layers}" for layers in process.layers]
    return lines + [f"{last.model}: {last.summary}" for last in process.last_prompts]


def _row(process: RunningLaunch) -> tuple[str, ...]:
    return (
        str(process.pid),
        format_duration(process.age_s),
        format_bytes(process.private_bytes),
        format_bytes(process.shared_bytes),
        ", ".join(process.snapshots) or "-",
        process.command[:80],
    )


class PsUsageResult(Result, frozen=True, kw_only=True):
    """Usage of each model on each of the last days, by all processes with this data folder.

    `is_recorded` is False if the configuration turns the recording off (`drift.record`).
    """

    days: tuple[DayOfUse, ...]
    is_recorded: bool

    def human(self) -> str:
        off = "" if self.is_recorded else "\nusage is not recorded: `drift.record` is off"
        if not self.days:
            return f"no answers in the last {_USAGE_DAYS} days{off}"
        head = ("DAY", "MODEL", "ANSWERS", "PROMPT", "CACHED", "GENERATED", "TIME", "SAVED")
        right = frozenset(range(2, 8))
        return table([head, *map(_usage_row, self.days)], right=right) + off


def _usage_row(day: DayOfUse) -> tuple[str, ...]:
    counts = (day.requests, day.prompt_tokens, day.cached_tokens, day.completion_tokens)
    times = (format_duration(ms / 1000) for ms in (day.busy_ms, day.saved_ms))
    return (day.day, day.model, *(f"{n:,}" for n in counts), *times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    view = parser.add_mutually_exclusive_group()
    add_everywhere(view)
    add_option(view, "--usage", f"answers, tokens and times by day and model, for {_USAGE_DAYS} days")


def run(options: argparse.Namespace, host: EngineHost) -> Result:
    """List running processes, or the usage by day. Raises StoreError."""
    if options.usage:
        # slow import: numpy takes 80 ms
        from edgeinfer.usage.daily_counts import drift_path, read_usage

        today = date.today()
        days = read_usage(drift_path(), today - timedelta(_USAGE_DAYS - 1), today)
        return PsUsageResult(days=days, is_recorded=host.config.drift.record)
    return PsResult(running=tuple(processes(everywhere=options.everywhere)))
