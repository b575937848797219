"""How a helper process is started from a checkout and from the frozen program."""

from __future__ import annotations

import sys

import pytest

from edgeinfer.platform.process import MODULE_SWITCH, child_command


@pytest.mark.parametrize(("frozen", "switch"), [(False, "-m"), (True, MODULE_SWITCH)])
def test_module_is_run_by_the_same_program(frozen: bool, switch: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    command = child_command("edgeinfer.runtime.llama.helpers.quantizer", "a", "b")
    assert command == [sys.executable, switch, "edgeinfer.runtime.llama.helpers.quantizer", "a", "b"]
