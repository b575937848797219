"""Shell scripts contain a few lines of Python, which neither ruff nor mypy checks."""

import re

import pytest

from ..conftest import ROOT

_IMPORT = re.compile(r"from (edgeinfer[\w.]*) import (\w+)")
IMPORTS = [
    (path.relative_to(ROOT), *names)
    for path in sorted(ROOT.glob("scripts/**/*.sh"))
    for names in _IMPORT.findall(path.read_text("utf-8"))
]


@pytest.mark.parametrize(("script", "module", "name"), IMPORTS, ids=str)
def test_what_a_script_imports_exists(script, module, name):
    package = __import__(module, fromlist=[name])  # imports `name` if it is a submodule
    assert hasattr(package, name), script
