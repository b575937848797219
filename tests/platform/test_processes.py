"""docs/development/processes.md names every program that this project starts as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from other_processes import command_name, descendants, has_ended, run_python, wait_until

from edgeinfer.platform import process
from edgeinfer.platform.process import MODULE_SWITCH, ask_child, child_command, describe_exit

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/development/processes.md").read_text()


def modules_with_a_main():
    for path in sorted((ROOT / "edgeinfer").rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text():
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_module_that_runs_as_a_process_is_in_the_table():
    modules = [name for name in modules_with_a_main() if name != "edgeinfer.__main__"]
    missing = [name for name in modules if name not in TABLE and name.split(".")[-1] not in TABLE]
    assert missing == []


def test_every_module_of_the_table_is_there():
    named = re.findall(r"`(edgeinfer(?:\.[a-z_]+)+)", TABLE)
    assert len(named) >= 8
    for name in named:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name


def test_every_log_of_the_table_is_written_by_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "edgeinfer").rglob("*.py"))
    logs = set(re.findall(r"`([a-z-]+\.log)`", TABLE))
    assert logs == {"auto-warm.log", "builder.log", "park.log", "dump.log"}
    assert all(f'"{log}"' in code for log in logs)


SESSION = Path("/proc/self/autogroup")
STEP_BACK = """
import os
from edgeinfer.platform import process
process.use_lowest_priority()
try:
    session = open("/proc/self/autogroup").read()
except OSError:
    session = ""
print(os.getpriority(os.PRIO_PROCESS, 0), session.partition("nice")[2].strip())
"""


def test_every_exit_of_a_process_has_a_description() -> None:
    descriptions = [describe_exit(code) for code in range(-64, 4)]
    assert {"SIGSEGV", "signal 40", "signal 32", "status 3"} <= set(descriptions)
    assert len(set(descriptions)) == len(descriptions)


def test_child_is_asked_and_its_failure_is_described(monkeypatch) -> None:
    monkeypatch.setattr(process, "child_command", lambda code, *_: [sys.executable, "-c", code])
    out, _ = ask_child("import sys; print(sys.stdin.read()[::-1])", content=b"abc")
    assert out == b"cba\n"
    assert ask_child("raise ValueError('too bad')")[1] == "ended with status 1: ValueError: too bad"
    assert ask_child("import os; os.kill(os.getpid(), 40)") == (b"", "ended with signal 40")
    stuck = "print(1, flush=True); import time; time.sleep(600)"
    assert ask_child(stuck, patience_s=0.2) == (b"", "took more than 0 s")
    stop = threading.Event()
    stop.set()
    assert ask_child(stuck, patience_s=3600.0, stop=stop) == (b"", "was stopped")


def test_child_that_leaves_a_process_behind_is_not_awaited_longer(monkeypatch) -> None:
    monkeypatch.setattr(process, "child_command", lambda code: [sys.executable, "-c", code])
    leave = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid)"
    out, ending = ask_child(leave, patience_s=3600.0)
    assert ending == "ended with status 0"
    os.kill(int(out), signal.SIGKILL)


ASKING = """
from edgeinfer.platform import process
process.child_command = lambda _: ["sleep", "3600"]
process.ask_child("")
"""


def test_child_that_is_asked_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", ASKING]) as parent:
        (child,) = wait_until(lambda: descendants(parent.pid), "the child")
        wait_until(lambda: command_name(child) == "sleep", "the child to run")
        parent.kill()
    try:
        wait_until(lambda: has_ended(child), "the child to end")
    finally:
        if not has_ended(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(
    not SESSION.exists(), reason="this kernel shares the processor only among processes"
)
def test_background_process_steps_back_with_its_own_session_only():
    # the file is empty without autogroups
    niceness = SESSION.read_text().partition("nice")[2].split()
    assert run_python(STEP_BACK, start_new_session=True).split() == ["19", "10"]
    assert run_python(STEP_BACK).split() == ["19", *niceness]


@pytest.mark.parametrize(("frozen", "switches"), [(False, ["-P", "-m"]), (True, [MODULE_SWITCH])])
def test_module_is_run_by_the_same_program(frozen: bool, switches: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    command = child_command("edgeinfer.runtime.llama.helpers.quantizer", "a", "b")
    assert command == [sys.executable, *switches, "edgeinfer.runtime.llama.helpers.quantizer", "a", "b"]
