"""The whole program on a real terminal with a real model: cold, and resumed from a snapshot."""

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from other_processes import run
from terminal import PROMPT, Terminal, shell_environment

from edgeinfer.chat.history.store import ConversationStore

EDGEINFER = Path(sys.executable).with_name("edgeinfer")
MODEL = "smollm2-135m-instruct"

pytestmark = [
    pytest.mark.model,
    pytest.mark.criu,
    pytest.mark.skipif(
        shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux"
    ),
]


@pytest.fixture(scope="module")
def home(smollm2, tmp_path_factory):
    """Return a home folder with the model and its snapshot."""
    home = tmp_path_factory.mktemp("terminal-home")
    environment = clean(home)
    for arguments in (["pull", str(smollm2), "--in-place", "--name", MODEL], ["warm", MODEL]):
        run(EDGEINFER, *arguments, env=environment)
    return home


def clean(home):
    return shell_environment(home) | {"EDITOR": "sed -i s/one/two/"}


@pytest.fixture(params=["cold", "resumed"])
def start_kind(request):
    return request.param


@pytest.fixture
def terminal(home, tmp_path):
    """A terminal, whose modes must be the same at the end of the test."""
    for path in (home / "edgeinfer/data").glob("conversations.db*"):
        path.unlink()
    with contextlib.closing(Terminal(tmp_path, clean(home))) as terminal:
        terminal.home = home
        terminal.modes_before = terminal.modes()
        yield terminal
        until_restored(terminal)


def until_restored(terminal):
    terminal.until(lambda: terminal.modes() == terminal.modes_before)


def begin(terminal, start_kind, *arguments):
    """Start the chat, and wait for its first paint and its model."""
    start(terminal, f"edgeinfer chat --temperature 0 {' '.join(arguments)}", start_kind)
    terminal.until_shown("Ask something")
    terminal.until_shown("context")


def start(terminal, line, start_kind):
    terminal.run(f"{line} --resume={'always' if start_kind == 'resumed' else 'never'}")


def leave(terminal):
    terminal.press("C-q")
    terminal.until(lambda: has_left(terminal))


def until_wide(terminal, columns):
    """Wait until the input field's frame is as wide as the terminal, minus a margin."""

    def is_wide():
        lines = terminal.screen().splitlines()
        return any(line.endswith("╮") and len(line) == columns - 1 for line in lines)

    terminal.until(is_wide)


def until_drawn(terminal, typed):
    """Wait for the whole screen: welcome, input field with the typed text, status line."""
    for text in ("Enter   asks", typed, "context"):
        terminal.until_shown(text)


def stored_turns(terminal):
    store = ConversationStore.open(terminal.home / "edgeinfer/data/conversations.db")
    turns = [t.content for t in store.turns(1).values()]
    store.close()
    return turns


def has_left(terminal):
    """Return whether the shell shows its prompt again."""
    return terminal.screen().rstrip().endswith(PROMPT.strip())


def answer_on(screen):
    """Return the words of each line of the last answer on the screen."""
    above = screen.partition("╭")[0]  # up to the frame of the input field
    lines = above.rpartition("❯")[2].splitlines()
    # before the first token, a line that ends in `…` says what is waited for
    drawn = [line for line in lines if line.startswith("   ") and not line.rstrip().endswith("…")]
    return [cells for cells in map(words_of, drawn) if cells]


def drawn_answer(terminal):
    """Return `answer_on` the screen; [] during a redraw, when tmux may show lines of two frames."""
    shown = answer_on(terminal.screen())
    return shown if shown == answer_on(terminal.screen()) else []


def words_of(text):
    return " ".join(re.findall(r"\w+", text))


def app_of(terminal):
    """Return the descendant with threads, which is the app; the launcher has none."""
    pids = (pid for pid, name, _ in terminal.children() if name == "edgeinfer")
    return next(pid for pid in pids if len(os.listdir(f"/proc/{pid}/task")) > 1)


def test_question_typed_before_the_screen_is_there_is_asked(terminal, start_kind):
    start(terminal, "edgeinfer chat --temperature 0", start_kind)
    terminal.run("Name three colours.")
    terminal.until_shown("❯ Name three colours.")
    terminal.until_shown("tok/s")
    leave(terminal)


def test_question_is_typed_streamed_and_the_app_quit(terminal, start_kind):
    begin(terminal, start_kind)
    assert terminal.modes() != terminal.modes_before
    terminal.until_shown("resumed in" if start_kind == "resumed" else "cold start")
    terminal.run("Name three colours.")
    terminal.until_shown("❯ Name three colours.")
    terminal.until_shown("tok/s")
    terminal.until(lambda: len(stored_turns(terminal)) == 2 and stored_turns(terminal)[1])
    leave(terminal)
    until_restored(terminal)
    assert "Ask something" not in terminal.screen()


def test_keys_that_arrive_together_take_effect_in_their_order(terminal, start_kind):
    begin(terminal, start_kind, "--max-tokens 4")
    question = ("abc", "BSpace", "BSpace", "Z", "C-j", "def", "Left", "Left", "X", "Enter")
    terminal.press(*question, "/temp 1", "Enter", "later")
    terminal.until_shown("Sampling: temperature 1, max-tokens 4")
    terminal.until_shown("later")
    terminal.until(lambda: stored_turns(terminal)[:1] == ["aZ\ndXef"])
    leave(terminal)


def test_stop_keeps_the_partial_answer(terminal, start_kind):
    begin(terminal, start_kind)
    terminal.run("Tell a long story about a lighthouse keeper, his dog and a ship.")
    terminal.until_shown("writing")
    terminal.until(lambda: len(stored_turns(terminal)) == 2 and len(stored_turns(terminal)[1]) > 10)
    terminal.press("Escape")
    terminal.until_shown("stopped")
    leave(terminal)


def test_resize_is_drawn_at_the_new_size(terminal, start_kind):
    begin(terminal, start_kind)
    for columns, rows in ((50, 15), (120, 40)):
        terminal.resize(columns, rows)
        until_wide(terminal, columns)
    assert len(terminal.screen().rstrip("\n").splitlines()) == 40
    leave(terminal)


def test_ctrl_z_and_fg(terminal, start_kind):
    begin(terminal, start_kind)
    terminal.type("half a thought")
    terminal.until_shown("half a thought")
    terminal.press("C-z")
    terminal.until_shown("Stopped")
    terminal.until(lambda: has_left(terminal))
    until_restored(terminal)
    terminal.run("echo still $((40+2))")
    terminal.until_shown("still 42")
    terminal.run("clear")
    terminal.run("fg")
    until_drawn(terminal, "half a thought")
    terminal.type(", whole")
    terminal.until_shown("half a thought, whole")
    leave(terminal)


def test_ctrl_l_draws_the_whole_screen_again(terminal, start_kind):
    begin(terminal, start_kind)
    terminal.type("half a thought")
    terminal.until_shown("half a thought")
    terminal.scribble("\x1b[2J\x1b[5;5Ha message of another program")
    terminal.until_shown("another program")
    terminal.press("C-l")
    until_drawn(terminal, "half a thought")
    assert "another program" not in terminal.screen()
    leave(terminal)


def test_editor_gets_the_terminal(terminal, start_kind):
    begin(terminal, start_kind)
    terminal.type("this one")
    terminal.until_shown("this one")
    terminal.press("C-o")
    terminal.until_shown("this two")
    leave(terminal)


def test_pipe_is_an_attachment_and_the_keys_still_work(terminal, start_kind):
    start(terminal, "echo 'the word is swordfish' | edgeinfer chat", start_kind)
    terminal.until_shown("+ stdin")
    terminal.type("What is the word?")
    terminal.until_shown("What is the word?")
    terminal.press("Enter")
    terminal.until(lambda: len(stored_turns(terminal)) == 2 and stored_turns(terminal)[1])
    leave(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_it_cleanly(terminal, start_kind, number):
    begin(terminal, start_kind)
    launcher = terminal.children()[0][0]
    os.kill(launcher, number)
    terminal.until(lambda: has_left(terminal))


def test_kill_9_of_the_app(terminal, start_kind):
    begin(terminal, start_kind)
    terminal.run("Tell a long story about a lighthouse keeper, his dog and a ship.")
    terminal.until(lambda: len(stored_turns(terminal)) == 2 and len(stored_turns(terminal)[1]) > 10)
    shown = terminal.until(lambda: drawn_answer(terminal))
    os.kill(app_of(terminal), signal.SIGKILL)
    terminal.until_shown("killed by signal 9")
    terminal.until(lambda: has_left(terminal))
    until_restored(terminal)
    assert " ".join(shown) in words_of(stored_turns(terminal)[1])
    begin(terminal, start_kind, "--continue")
    terminal.until_shown("❯ Tell a long story")
    terminal.until_shown("interrupted")
    leave(terminal)


def test_kill_9_of_the_launcher(terminal, start_kind):
    begin(terminal, start_kind)
    everyone = [pid for pid, _, _ in terminal.children()]
    os.kill(everyone[0], signal.SIGKILL)
    until_restored(terminal)
    terminal.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone))
    terminal.run("echo still $((40+2))")
    terminal.until_shown("still 42")


def test_plain_chat_answers_and_restores_the_terminal(terminal, start_kind):
    start(terminal, "edgeinfer chat --plain --max-tokens 8", start_kind)
    terminal.until_shown("Model: smollm2")
    terminal.run("Say hello.")
    terminal.until_shown("Answer: ")
    terminal.until(lambda: terminal.screen().rstrip().endswith(">"))
    terminal.press("C-d")
    terminal.until(lambda: has_left(terminal))


def test_models_that_suit_the_machine_are_offered_if_none_is_here(terminal, tmp_path):
    terminal.run(f"EDGEINFER_HOME={tmp_path}/empty edgeinfer")
    terminal.until_shown("No model is here yet")
    terminal.until_shown("tiny, ~")
    terminal.press("Escape")
    leave(terminal)
