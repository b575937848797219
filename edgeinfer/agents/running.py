"""Run an agent in this terminal until it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from edgeinfer.agents.table import Agent, AgentTarget
from edgeinfer.errors import UsageError

#: Sent on to the agent. Ctrl-C and Ctrl-Z reach it by the terminal.
_SENT_ON = (signal.SIGTERM, signal.SIGHUP)


def find_program(agent: Agent) -> str:
    """Return the agent's program on PATH. Raises UsageError with the install command."""
    found = shutil.which(agent.name)
    if found is None:
        raise UsageError(
            f"{agent.title} is not installed: no `{agent.name}` on PATH",
            hint=f"install it: {agent.install}",
        )
    return found


def run(agent: Agent, target: AgentTarget, arguments: Sequence[str]) -> int:
    """Run the agent; return its exit code, or 128 plus the number of the signal that ended it."""
    program = find_program(agent)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        setup = agent.setup(target, Path(folder))
        command = [program, *setup.arguments, *arguments]
        with _leaving_signals_to(process := _start(command, setup.environment)):
            status = process.wait()
    return status if status >= 0 else 128 - status


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env={**os.environ, **environment})
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}", hint="") from error


@contextlib.contextmanager
def _leaving_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave Ctrl-C to the agent, and forward the signals that reach this process alone."""

    def send_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, send_on) for number in _SENT_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
