"""docs/processes.md names every program that this project starts as a process of its own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/processes.md").read_text()


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
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name


def test_every_log_of_the_table_is_written_by_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "edgeinfer").rglob("*.py"))
    logs = set(re.findall(r"`([a-z-]+\.log)`", TABLE))
    assert logs == {"auto-warm.log", "builder.log", "park.log", "dump.log"}
    assert all(f'"{log}"' in code for log in logs)
