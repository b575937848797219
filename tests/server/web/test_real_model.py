"""The small model behind the terminal and the page, each in a process of its own: nothing is prefilled again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeinfer.chat.history.store import ConversationStore

from .conftest import Signed

pytestmark = [pytest.mark.model, pytest.mark.slow]
PROGRAM = str(Path(sys.executable).with_name("edgeinfer"))
OPTIONS = ("--resume", "never", "--ctx", "2048")
LONG = "Here is a list of words: " + " ".join(f"word{n}" for n in range(120)) + ". Which is the first?"


@pytest.fixture
def home(smollm2):
    """The test's home with the small model in it."""
    pull = [PROGRAM, "pull", str(smollm2), "--name", "small", "--in-place", "--quiet"]
    subprocess.run(pull, check=True)


def chat(*lines):
    typed = "".join(f"{line}\n" for line in lines)
    command = [PROGRAM, "chat", "--plain", "--continue", "--max-tokens", "16", *OPTIONS, "small"]
    subprocess.run(command, input=typed, text=True, check=True, capture_output=True)


def test_a_switch_prefills_only_what_is_new(home):
    chat(LONG)
    command = [PROGRAM, "serve", "small", "--port", "0", "--log", "text", *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as serving:
        url = next(found[0] for line in serving.stderr if (found := re.search(r"http://[\d.:]+", line)))
        page = Signed(SimpleNamespace(url=url))
        (listed,) = page.get("/conversations")
        from_terminal = page.ended(listed["id"])[-1]["stats"]
        page.ask("And the second?", listed["id"])
        from_page = page.ended(listed["id"])[-1]["stats"]
        page.client.close()
        serving.terminate()
        serving.stderr.read()
    # the last token of an answer is never decoded; the template closes the turn and opens the next
    before = from_terminal["prompt_tokens"] + from_terminal["completion_tokens"] - 1
    assert before > 250
    assert from_page["cached_tokens"] >= before - 1
    chat("And the third?")
    after = from_page["prompt_tokens"] + from_page["completion_tokens"] - 1
    store = ConversationStore.open()
    turns = store.turns(listed["id"])
    store.close()
    assert turns[max(turns)].stats.cached_tokens >= after - 1
