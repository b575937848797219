"""Processes that a test starts: a port for one, those below it, and waiting for what they do."""

import contextlib
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

#: The text of a program: `edgeinfer`, started by its launcher.
LAUNCHER = (
    "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.launcher import main; sys.exit(main())"
)
T = TypeVar("T")
_PAUSE_S = 0.01


def free_port() -> int:
    """Return an unused port, none of those that the kernel may give to another test meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


def run(*command: object, check: bool = True, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with output as text. Unless `check` is off, fail with what it said."""
    usual = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*map(str, command)], check=False, **usual | settings)
    told = (command, done.returncode, done.stdout, done.stderr[-2000:])
    assert not check or done.returncode == 0, told
    return done


def run_python(program: str, *arguments: object, **settings: Any) -> str:
    """Run the text of a program in a process of its own; return what it printed."""
    return run(sys.executable, "-c", program, *arguments, **settings).stdout


def wait_until(condition: Callable[[], T], awaited: str, seconds: float = 120.0) -> T:
    """Wait until `condition` is true; return its value. After `seconds`, fail with the text `awaited`."""
    turns = threading.Event()
    for _ in range(int(seconds / _PAUSE_S)):
        if outcome := condition():
            return outcome
        turns.wait(_PAUSE_S)
    raise AssertionError(f"waited {seconds:.0f} s: {awaited}")


def descendants(pid: int) -> list[int]:
    """Return the pids below `pid`, each parent before its children; [] once `pid` has ended."""
    pids = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():  # whichever thread started it
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    pids += [int(child), *descendants(int(child))]
    return pids


def command_name(pid: int) -> str:
    """Return the name of a process, at most 15 bytes; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def engines_below(pid: int) -> list[int]:
    """Return the processes below a launcher that have an engine, the launched one first."""
    engines = [process for process in descendants(pid) if command_name(process) == "edgeinfer"]
    return [process for process in engines if not descendants(process)]


@contextlib.contextmanager
def limited_files(n_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `n_bytes`, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def private_bytes(pid: int) -> int:
    """Return the memory that only this process holds, dirty or locked (bytes).

    Clean file pages are neither, and `Anonymous` would count dirty pages a second time.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    private = [line for line in rollup if line.startswith(("Private_Dirty:", "Swap:"))]
    return sum(int(line.split()[1]) * 1024 for line in private)
