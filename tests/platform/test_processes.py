"""docs/development/processes.md names every program that this project starts as a process of its own."""

import re
import sys
from pathlib import Path

import pytest
from other_processes import run_python

from edgeinfer.platform.process import MODULE_SWITCH, child_command

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/development/processes.md").read_text()


def modules_with_a_main():
    for path in sorted((ROOT / "edgeinfer").rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text():
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_module_that_runs_as_a_process_is_in_the_table():
    missing = [
        name
        for name in modules_with_a_main()
        if name != "edgeinfer.__main__" and name not in TABLE and name.split(".")[-1] not in TABLE
    ]
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
