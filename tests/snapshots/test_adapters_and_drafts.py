"""Adapters and draft models are part of a snapshot's options, memory and conditions."""

import os
import shutil

import pytest
from made_models import make_adapter

from .conftest import MODEL, NO_AUTO_WARM, Endpoint

pytestmark = pytest.mark.criu


@pytest.fixture
def adapter(user):
    path = user.home / "red.gguf"
    make_adapter(path, 1, strength=0.5)
    os.chown(path, user.uid, user.gid)
    return path


def test_an_adapter_is_applied_by_default_resumed_and_cold(user, adapter):
    user.settings(NO_AUTO_WARM)
    user.run("warm", MODEL, "--lora", str(adapter), "--quiet").check()
    resumed = user.ask("--lora", "red.gguf")
    assert resumed.start["how"] == "resumed"
    cold = user.ask("--lora", str(adapter), "--resume=never")
    assert resumed.result["text"] == cold.result["text"]
    plain = user.ask()
    assert plain.start["how"] == "cold"
    assert "no snapshot with the configured load options" in plain.err
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


@pytest.mark.needs("time")
def test_draft_model_is_resumed_with_the_model_and_its_file_is_compared(user, smollm2):
    user.settings(NO_AUTO_WARM)
    small = user.home / "draft.gguf"
    shutil.copyfile(smollm2, small)
    os.chown(small, user.uid, user.gid)
    user.run("warm", MODEL, "--draft", str(small), "--quiet").check()
    asked = ("--draft", str(small))
    resumed = user.ask(*asked)
    assert resumed.start["how"] == "resumed"
    assert resumed.result["text"] == user.ask("--draft", "none", "--resume=never").result["text"]
    with Endpoint(user, MODEL, *asked, "--resume=always") as endpoint:
        props = endpoint.client.get("/props").json()
        assert props["models"][0]["info"]["choices"]["draft"]["value"] == str(small)
    plain = user.ask()
    assert plain.start["how"] == "cold"
    assert "no snapshot with the configured load options" in plain.err
    os.utime(small, ns=(1, 1))
    changed = user.ask(*asked)
    assert changed.start["how"] == "cold"
    assert "draft.gguf was changed" in changed.err


def test_draft_model_that_does_not_fit_is_said_by_warm(user):
    outcome = user.run("warm", MODEL, "--draft", "nosuch", "--quiet")
    assert outcome.code
    assert "draft model: no model is called 'nosuch'" in outcome.err
