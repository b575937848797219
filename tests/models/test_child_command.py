"""How a helper process is started from a checkout and from the frozen program."""

from __future__ import annotations

import sys

from edgeinfer.platform.process import MODULE_SWITCH, child_command


def test_from_a_checkout() -> None:
    assert child_command("edgeinfer.runtime.llama.helpers.quantizer", "{}") == [
        sys.executable,
        "-m",
        "edgeinfer.runtime.llama.helpers.quantizer",
        "{}",
    ]


def test_from_the_frozen_program(monkeypatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    command = child_command("edgeinfer.runtime.llama.helpers.perplexity", "a", "b")
    assert command == [
        sys.executable,
        MODULE_SWITCH,
        "edgeinfer.runtime.llama.helpers.perplexity",
        "a",
        "b",
    ]
