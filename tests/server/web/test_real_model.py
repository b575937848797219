"""The terminal chat and the page share conversations, and no prefix is prefilled twice."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from other_processes import wait_until
from terminal import Terminal, shell_environment

from edgeinfer.config.config_file import save
from edgeinfer.platform import paths
from edgeinfer.runtime.prefix_cache.kv_block import BLOCK_TOKENS, read_header
from edgeinfer.runtime.prefix_cache.retention import list_blocks

from .conftest import Signed

pytestmark = [pytest.mark.model, pytest.mark.slow]
PROGRAM = str(Path(sys.executable).with_name("edgeinfer"))
OPTIONS = ("--resume", "never", "--ctx", "2048")
LONG, MORE, LAST = (
    f"Here is a list of words: {' '.join(f'word{n}' for n in numbers)}. Which is the first?"
    for numbers in (range(120), range(200, 240), range(300, 340))
)


@pytest.fixture
def home(smollm2):
    """A home folder in which the small model is installed."""
    pull = [PROGRAM, "pull", str(smollm2), "--name", "small", "--in-place", "--quiet"]
    subprocess.run(pull, check=True)
    save(("snapshots", "auto-warm"), False)  # no background process takes snapshots


def chat(*lines):
    typed = "".join(f"{line}\n" for line in lines)
    command = [PROGRAM, "chat", "--plain", "--continue", "--max-tokens", "16", *OPTIONS, "small"]
    subprocess.run(command, input=typed, text=True, check=True, capture_output=True)


@pytest.fixture
def typing(home, tmp_path):
    """Return `typing()`, which continues the last conversation by `edgeinfer chat` in a terminal."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    environment = shell_environment(tmp_path) | {"EDGEINFER_HOME": os.environ["EDGEINFER_HOME"]}
    with contextlib.closing(Terminal(tmp_path, environment)) as terminal:

        def start():
            terminal.run(f"edgeinfer chat --continue --max-tokens 16 {' '.join(OPTIONS)} small")
            terminal.until_shown("context")
            return terminal

        yield start


@contextlib.contextmanager
def serving():
    """Serve the model in another process; yield the page's requests."""
    command = [PROGRAM, "serve", "small", "--port", "0", "--log", "text", *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as running:
        url = next(match[0] for line in running.stderr if (match := re.search(r"http://[\d.:]+", line)))
        page = Signed(SimpleNamespace(url=url))
        try:
            yield page
        finally:
            page.client.close()
            running.terminate()
            running.stderr.read()


def decoded_tokens(stats):
    """Return the number of decoded tokens: prompt and answer without its last token."""
    return stats["prompt_tokens"] + stats["completion_tokens"] - 1


def until_stored(stats):
    """Wait until the last KV block of a conversation, a partial one, is on the disk."""
    n = decoded_tokens(stats) % BLOCK_TOKENS

    def is_stored():
        headers = [read_header(b.path.read_bytes()) for b in list_blocks(paths.blocks_dir())]
        return any(n - 1 <= len(header.tokens) // 4 < n + 8 for header in headers)

    wait_until(is_stored, "the last block on the disk")


def test_an_open_terminal_prefills_only_what_is_new(typing):
    chat(LONG)
    terminal = typing()
    with serving() as page:
        (listed,) = page.get("/conversations")
        page.ask(MORE, listed["id"])
        turns = page.finished_turns(listed["id"])
        until_stored(turns[-1]["stats"])
        terminal.until_shown("word239")
        terminal.until(lambda: "is writing" not in terminal.screen())
        terminal.type(LAST)
        terminal.press("Enter")

        def last_stats():
            turns = page.finished_turns(listed["id"])
            return len(turns) == 6 and turns[-1]["stats"]

        from_terminal = terminal.until(last_stats)
        assert from_terminal["cached_tokens"] >= decoded_tokens(turns[-1]["stats"]) - 1
        until_stored(from_terminal)
        page.ask("And the fourth?", listed["id"])
        from_page = page.finished_turns(listed["id"])[-1]["stats"]
        assert from_page["cached_tokens"] >= decoded_tokens(from_terminal) - 1
