"""`edgeinfer stop`: end running processes as Ctrl-C would, and wait for their end."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal

from edgeinfer.cli.options import add_everywhere
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost
from edgeinfer.snapshots.running import RunningLaunch, has_loaded, processes

#: Time (s) until a process is killed: more than the 33 s (`Limits.drain_s` + 3) that requests may take.
GRACE_S = 35.0


class StopResult(Result, frozen=True, kw_only=True):
    """PIDs of ended processes: `stopped` ones ended after SIGTERM, `killed` ones only after SIGKILL."""

    stopped: tuple[int, ...]
    killed: tuple[int, ...]

    def human(self) -> str:
        parts = (("stopped", self.stopped), ("killed", self.killed))
        said = [f"{verb} {', '.join(map(str, pids))}" for verb, pids in parts if pids]
        return "; ".join(said) or "nothing was running"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="*", metavar="PID|MODEL", help="from `edgeinfer ps`")
    add_option(parser, "--all", "stop all of them")
    add_everywhere(parser)


def run(options: argparse.Namespace, _host: EngineHost) -> StopResult:
    """Stop processes. Raises UsageError if none is named, or a name matches no running process."""
    running = processes(everywhere=options.everywhere)
    if not options.which and not options.all:
        hint = "`edgeinfer ps` lists processes; `edgeinfer stop --all` stops them all"
        raise UsageError("name the processes to stop", hint=hint)
    if options.which and options.all:
        raise UsageError("leave out either the names or --all", hint="`edgeinfer ps` lists processes")
    chosen = [r for name in options.which for r in _find_processes(name, running)]
    outcomes = {process.pid: _end(process.pid) for process in (running if options.all else chosen)}
    stopped = tuple(pid for pid, was_enough in outcomes.items() if was_enough)
    return StopResult(stopped=stopped, killed=tuple(pid for pid in outcomes if pid not in stopped))


def _find_processes(name: str, running: list[RunningLaunch]) -> list[RunningLaunch]:
    matches = [r for r in running if name == str(r.pid)]
    matches = matches or [r for r in running if name in r.arguments or has_loaded(r.pid, name)]
    if not matches:
        hint = "`edgeinfer ps --everywhere` lists all processes, including other data folders"
        raise UsageError(f"no running process is called {name}", hint=hint)
    return matches


def _end(pid: int) -> bool:
    """Send SIGTERM and wait, then SIGKILL; return whether SIGTERM was enough."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True  # the process has ended already
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a suspended process ends only after SIGCONT
        if select.select([handle], [], [], GRACE_S)[0]:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        select.select([handle], [], [], GRACE_S)
        return False
    finally:
        os.close(handle)
