"""What tests/conftest.py adds to pytest: more generated cases, skips by reason, no leftovers."""

import os
import sys
from pathlib import Path

import pytest
from other_processes import run

from ..conftest import ROOT

_TESTS = """
import hypothesis, pytest
from hypothesis import strategies
seen = []
@pytest.mark.parametrize("seed", range(3))
def test_of_seeds(seed): pass
@hypothesis.settings(max_examples=50, database=None)
@hypothesis.given(strategies.integers())
def test_of_examples(number): seen.append(number)
def test_of_cases_is_last(cases): assert cases(7) == 14 and len(seen) >= 100
@pytest.mark.parametrize("number", range(2))
def test_fuzz(number): pytest.skip("not root")
def test_of_nothing_generated(): assert False
"""


@pytest.mark.slow  # starts pytest
def test_more_cases_are_generated_and_skips_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(_TESTS)
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    command = (sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider")
    variables |= {"TMPDIR": str(tmp_path / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}
    (tmp_path / "temporary").mkdir()
    told = run(*command, "--cases=2", tmp_path / "test_made.py", cwd=ROOT, env=variables).stdout
    assert "8 passed, 2 skipped, 1 deselected" in told
    assert "skipped: 2 tests: not root (the same command as root runs them)" in told.splitlines()
    assert not list((tmp_path / "temporary").glob("edgeinfer-tests-*"))
