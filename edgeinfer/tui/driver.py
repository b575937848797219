"""The terminal, which may not be this process's controlling terminal.

A resumed process gets its terminal as descriptors, and its signals from the launcher. So: input and output are the
descriptors this driver is given, the size is asked of them, and a suspension stops whoever the shell waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, ClassVar, TextIO

from textual.drivers.linux_driver import LinuxDriver


class TerminalDriver(LinuxDriver):
    """LinuxDriver on the terminal that `claim_terminal` found. `suspender` stops the job; None: stop our own group."""

    suspender: ClassVar[Any] = None
    out: ClassVar[TextIO | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.out is not None:
            self._file: Any = self.out

    def _get_terminal_size(self) -> tuple[int, int]:
        """The window's size; COLUMNS and LINES are not believed, they were true when the shell started."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self.fileno)
            if columns > 0 and rows > 0:
                return columns, rows
        return 80, 24

    def _sigtstp_application(self, *_: object) -> None:
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        if self.suspender is not None:
            self.suspender()
        else:
            os.killpg(0, signal.SIGSTOP)  # the group: a one-file binary has a parent the shell waits for


def claim_terminal() -> TextIO | None:
    """Make descriptor 0 a terminal when stdin is a pipe, and return a stream to the terminal; None where there is none.

    Output goes to the first of stdout, stderr, stdin that is a terminal. Nothing needs a controlling terminal.
    """
    fd = next((n for n in (1, 2, 0) if _is_terminal(n)), None)
    if fd is None:
        return None
    if not _is_terminal(0):
        os.dup2(fd, 0)  # a terminal's descriptor reads and writes, whichever it was opened as
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    return open(os.dup(fd), "w", encoding="utf-8", errors="replace")


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
