"""A real terminal for tests: a shell in tmux, which gets keys and whose screen is read."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from other_processes import command_name, descendants, run

PROMPT = "ready$ "


def shell_environment(home):
    """Return the environment of a shell that finds edgeinfer and has its own home folder."""
    return {
        "HOME": str(home),
        "EDGEINFER_HOME": str(home / "edgeinfer"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "tmux-256color",
        "LANG": "C.UTF-8",
        "PS1": PROMPT,
    }


class Terminal:
    """An 80 by 24 terminal with an interactive bash. Waits are for conditions, never for a fixed time.

    `become` is put before a command, to run it as another user.
    """

    def __init__(self, folder: Path, environment: dict[str, str], become: Sequence[str] = ()):
        self._socket = str(folder / "tmux")
        variables = (f"{k}={v}" for k, v in environment.items())
        shell = [*become, "env", "-i", *variables, *"bash --norc --noprofile -i".split()]
        size = ("-x", "80", "-y", "24")
        self._tmux("new-session", "-d", *size, "-c", environment["HOME"], *shell)
        self._tmux("set-option", "-g", "escape-time", "0")
        self.until(lambda: "ready$" in self.screen())

    def _tmux(self, *arguments):
        return run("tmux", "-S", self._socket, "-f", "/dev/null", *arguments).stdout

    def close(self):
        with contextlib.suppress(AssertionError):
            self._tmux("kill-server")

    def screen(self):
        return self._tmux("capture-pane", "-p")

    def type(self, text):
        self._tmux("send-keys", "-l", text)

    def press(self, *keys):
        self._tmux("send-keys", *keys)

    def run(self, line):
        """Type a line for the shell."""
        self.type(line)
        self.press("Enter")

    def resize(self, columns, rows):
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def until(self, condition, seconds=60.0):
        """Wait for a condition and return its value; after `seconds`, fail and show the screen."""
        deadline = time.monotonic() + seconds
        while not (outcome := condition()):
            assert time.monotonic() < deadline, f"it did not come true; the screen:\n{self.screen()}"
            time.sleep(0.02)  # each check starts processes, so do not check too often
        return outcome

    def until_shown(self, text, seconds=60.0):
        return self.until(lambda: text in self.screen(), seconds)

    def modes(self):
        """Return the modes that tmux knows (alternate screen, mouse, cursor, paste) and the tty's."""
        seen = "#{alternate_on} #{mouse_any_flag} #{cursor_flag} #{mouse_sgr_flag}"
        flags = self._tmux("display-message", "-p", seen)
        tty = self._tmux("display-message", "-p", "#{pane_tty}").strip()
        stty = run("stty", "-a", "-F", tty).stdout
        # the first line contains the size, which may change
        return flags.strip(), stty.split("\n", 1)[1]

    def scribble(self, text):
        """Write to the terminal, as another program would."""
        tty = self._tmux("display-message", "-p", "#{pane_tty}").strip()
        Path(tty).write_text(text)

    def shell_pid(self):
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def children(self, pid=None):
        """Return the shell's descendants, depth first: (pid, name, command)."""
        processes = []
        for child in descendants(pid or self.shell_pid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                processes.append((child, command_name(child), command))
        return processes
