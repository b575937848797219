"""A draft model is part of a snapshot's options, memory and conditions."""

import os
import shutil

import pytest

from .conftest import MODEL, NO_AUTO_WARM, Endpoint

pytestmark = pytest.mark.criu


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
    assert "no snapshot without adapters or a draft model" in plain.err
    os.utime(small, ns=(1, 1))
    changed = user.ask(*asked)
    assert changed.start["how"] == "cold"
    assert "draft.gguf was changed" in changed.err


def test_draft_model_that_does_not_fit_is_said_by_warm(user):
    outcome = user.run("warm", MODEL, "--draft", "nosuch", "--quiet")
    assert outcome.code
    assert "draft model 'nosuch': no model is called that" in outcome.err
