"""Adapters in snapshots: part of the options and conditions, applied by default, kept by a rebuild."""

import os

import pytest
from made_models import make_adapter

pytestmark = pytest.mark.criu

MODEL = "small"


@pytest.fixture
def adapter(user):
    path = user.home / "red.gguf"
    make_adapter(path, 1, strength=0.5)
    os.chown(path, user.uid, user.gid)
    return path


def test_an_adapter_is_applied_by_default_resumed_and_cold(user, adapter):
    user.settings("[snapshots]\nauto-warm = false\n")
    user.run("warm", MODEL, "--lora", str(adapter), "--quiet").check()
    resumed = user.ask("--lora", "red.gguf")
    assert resumed.start["how"] == "resumed"
    cold = user.ask("--lora", str(adapter), "--resume=never")
    assert resumed.result["text"] == cold.result["text"]
    plain = user.ask()
    assert plain.start["how"] == "cold"
    assert "no snapshot without adapters" in plain.err
    assert plain.result["text"] != cold.result["text"]


@pytest.mark.needs("time")
def test_a_changed_adapter_is_noticed_and_the_rebuild_has_the_new_one(user, adapter):
    first = user.ask("--lora", str(adapter))
    assert first.start["how"] == "cold"
    user.logged("not built before these options are used again")
    user.ask("--lora", str(adapter))
    user.logged("built in")
    assert user.ask("--lora", str(adapter)).start["how"] == "resumed"
    (user.data / "state/auto-warm.log").unlink()

    make_adapter(adapter, 2, strength=0.5)
    changed = user.ask("--lora", str(adapter))
    assert changed.start["how"] == "cold"
    assert "red.gguf was changed" in changed.err
    assert changed.result["text"] != first.result["text"]
    user.logged("built in")
    rebuilt = user.ask("--lora", str(adapter))
    assert rebuilt.start["how"] == "resumed"
    assert rebuilt.result["text"] == changed.result["text"]


def test_an_adapter_that_is_not_there_is_said_before_anything_is_built(user):
    outcome = user.run("warm", MODEL, "--lora", "none.gguf", "--quiet")
    assert outcome.code == 2
    assert "none.gguf is not a file" in outcome.err
