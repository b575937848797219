"""oterm at a terminal: a chat with its shell tool, chosen with the mouse, and two turns."""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tui", "made"))

from terminal import PROMPT, Terminal

url, model = sys.argv[1:]


def click(terminal: Terminal, text: str) -> None:
    """Press the mouse's button on the second cell of what the screen shows."""
    lines = terminal.until_shown(text) and terminal.screen().splitlines()
    row = next(i for i, line in enumerate(lines) if text in line)
    position = f"{lines[row].index(text) + 2};{row + 1}"
    terminal.type(f"\x1b[<0;{position}M\x1b[<0;{position}m")


def hold_session(terminal: Terminal) -> None:
    """Make a chat with a tool; then two turns, of which the first calls it."""
    terminal.resize(110, 40)
    terminal.run("oterm")
    terminal.until_shown("Press Ctrl+N")
    terminal.press("C-n")
    click(terminal, f"{model}:latest")
    terminal.until_shown("🛠")  # the model calls tools: they can be chosen
    click(terminal, " shell")
    click(terminal, "  Save")
    terminal.until_shown("❯")
    terminal.type("Make a file hello.txt.")
    terminal.press("Enter")
    terminal.until_shown("The tool has done it.")
    terminal.type("Now say what you did.")
    terminal.press("Enter")
    terminal.until_shown("second turn")
    terminal.press("C-q")
    terminal.until(lambda: terminal.screen().rstrip().endswith(PROMPT.rstrip()))


with tempfile.TemporaryDirectory(prefix="edgeinfer-oterm-") as folder:
    home = Path(folder)
    data = home / "data"
    data.mkdir()
    (data / "config.json").write_text(json.dumps({"splash-screen": False}))
    environment = {
        "HOME": folder,
        "OTERM_DATA_DIR": str(data),
        "OLLAMA_URL": url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "tmux-256color",
        "LANG": "C.UTF-8",
        "PS1": PROMPT,
        "HISTFILE": "/dev/null",
    }
    terminal = Terminal(home, environment)
    try:
        hold_session(terminal)
    finally:
        terminal.close()
    assert (home / "hello.txt").read_text() == "hello\n"
print(version("oterm"))
