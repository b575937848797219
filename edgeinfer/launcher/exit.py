"""End a launch with its app's status or signal, and restore the terminal.

If the launcher is killed, its app dies too, and neither can restore the terminal. A forked child does
it then: it waits on a pipe whose other end only the launcher has. It costs one fork and 0.1 MB.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import os
import sys
import time

from edgeinfer.platform import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from edgeinfer.errors import EdgeInferError


#: Signals by which a user ends a process. An app that such a signal ended is not restarted.
ASKED_TO_END = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
#: Exit code after an unexpected exception (`cli.main`): `serve` starts its app again.
UNEXPECTED = 70


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def fail(error: EdgeInferError) -> NoReturn:
    """Print an error that occurred before any app was started, and exit with its code."""
    from edgeinfer import error_text  # imported here: it takes 1 ms

    say(error_text.describe_error(error))
    os._exit(error_text.exit_code(error))


def end_by_signal(number: int) -> NoReturn:
    """End this process by the signal that ended its app, so that the parent process sees it."""
    _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


#: Escape sequences that undo what a full-screen app sets: alternate screen, hidden cursor, no wrapping,
#: colours, and reports of mouse, focus, paste and keys.
RESTORE = (
    b"\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2048l"
    b"\x1b[<u\x1b[0m\r\n"
)
#: Time (s) that a dying app gets for its last output before the terminal is restored.
_DYING_S = 0.1
_SIGNALS = (
    *ASKED_TO_END,
    *(_signal.SIGTSTP, _signal.SIGTTOU, _signal.SIGTTIN),
    *(_signal.SIGUSR1, _signal.SIGUSR2),
)


class Terminal:
    """Restores the terminal after an app. Without a terminal, all methods do nothing."""

    def __init__(self) -> None:
        self._fd = next((fd for fd in (1, 2, 0) if os.isatty(fd)), None)
        self._modes = None if self._fd is None else _modes_of(self._fd)
        self._guard: int | None = None

    def watch(self) -> None:
        """Fork the child that restores the terminal if this process is killed."""
        if self._fd is None or self._modes is None:
            return
        read_fd, self._guard = os.pipe()
        if os.fork() == 0:
            try:
                os.close(self._guard)
                _wait(read_fd, self._fd, self._modes)
            finally:
                os._exit(0)
        os.close(read_fd)

    def is_ours(self) -> bool:
        """Return whether this process is in the terminal's foreground process group."""
        try:
            return self._fd is not None and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def dismiss_guard(self) -> None:
        """End the child of `watch`; it then leaves the terminal as it is."""
        if self._guard is not None:
            process.quietly(os.write, self._guard, b".")

    def restore(self) -> None:
        """Restore the terminal's modes and screen, after an app that died without doing so."""
        if self._fd is not None and self._modes is not None:
            _restore(self._fd, self._modes)


def _modes_of(fd: int) -> list[object] | None:
    import termios  # imported here: it takes 0.1 ms

    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None


def _restore(fd: int, modes: list[object]) -> None:
    import termios

    try:
        termios.tcsetattr(fd, termios.TCSANOW, modes)  # type: ignore[arg-type]
        os.write(fd, RESTORE)
    except (termios.error, OSError):
        pass


def _wait(read_fd: int, fd: int, modes: list[object]) -> NoReturn:
    for number in _SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    process.redirect_to_null(fd)
    if not os.read(read_fd, 1):
        time.sleep(_DYING_S)
        _restore_after_death(fd, modes)
    sys.exit(0)


def _restore_after_death(fd: int, modes: list[object]) -> None:
    """Restore the terminal, unless a shell has already set its own modes: then only the screen."""
    import termios

    now = termios.tcgetattr(fd)
    if now[3] & termios.ISIG:  # a shell's mode: Ctrl-C sends a signal; in an app's, it is input
        os.write(fd, RESTORE)
    else:
        _restore(fd, modes)
