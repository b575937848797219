"""`edgeinfer ps`: what runs, its replicas of a model, where its layers are, and how much of its latest
prompt was cached.
"""

from __future__ import annotations

import argparse

from edgeinfer.cli.options import add_everywhere
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.host import Host
from edgeinfer.snapshots.running import Running, processes
from edgeinfer.units import format_bytes, format_duration


class PsResult(Result, frozen=True, kw_only=True):
    """This user's running launches that keep their data here, or all with `--everywhere`."""

    running: tuple[Running, ...]

    def human(self) -> str:
        if not self.running:
            return "nothing is running"
        rows = [("PID", "AGE", "PRIVATE", "SHARED", "SNAPSHOT", "COMMAND"), *map(_row, self.running)]
        reports = [
            f"{process.pid} {report}" for process in self.running for report in _reports(process)
        ]
        return "\n\n".join([table(rows), *(["\n".join(reports)] if reports else [])])


def _reports(process: Running) -> list[str]:
    found = [f"{one.model}: {one.words}" for one in process.replicas]
    found += [f"{one.model}: layers on GPUs: {one.layers}" for one in process.layers]
    return found + [f"{last.model}: {last.summary}" for last in process.last_prompts]


def _row(process: Running) -> tuple[str, ...]:
    return (
        str(process.pid),
        format_duration(process.age_s),
        format_bytes(process.private_bytes),
        format_bytes(process.shared_bytes),
        ", ".join(process.snapshots) or "-",
        process.command[:80],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_everywhere(parser)


def run(options: argparse.Namespace, _host: Host) -> PsResult:
    """List running processes; change nothing."""
    return PsResult(running=tuple(processes(everywhere=options.everywhere)))
