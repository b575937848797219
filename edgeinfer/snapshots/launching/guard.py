"""A child that restores the terminal when the launcher is killed outright.

Its app dies with the launcher, and neither can put the terminal right then. The child costs one fork
and 0.1 MB of its own. Standard library only: it is made on the way of every chat.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms
import os
import sys
import time

from edgeinfer import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

#: Leave the alternate screen; cursor and wrapping on; mouse, focus, paste, key reports and colours off.
RESTORE = (
    b"\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2048l"
    b"\x1b[<u\x1b[0m\r\n"
)
#: For the app's last words to be written before ours: it dies in the same moment as the launcher.
_DYING_S = 0.1
_SIGNALS = (
    _signal.SIGHUP,
    _signal.SIGINT,
    _signal.SIGQUIT,
    _signal.SIGTERM,
    _signal.SIGTSTP,
    _signal.SIGTTOU,
    _signal.SIGTTIN,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
)


def terminal() -> int | None:
    """The first standard descriptor that is a terminal."""
    return next((fd for fd in (1, 2, 0) if os.isatty(fd)), None)


def put_back(fd: int, modes: list[object]) -> None:
    """The modes and the screen as they were. Never raises."""
    import termios  # 0.1 ms

    try:
        termios.tcsetattr(fd, termios.TCSANOW, modes)  # type: ignore[arg-type]
        os.write(fd, RESTORE)
    except (termios.error, OSError):
        pass


def watch(fd: int, modes: list[object]) -> int:
    """Start the child and return the descriptor that tells it of our end; `dismiss` it before that."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        try:
            os.close(write_fd)
            _wait(read_fd, fd, modes)
        finally:
            os._exit(0)
    os.close(read_fd)
    return write_fd


def dismiss(write_fd: int) -> None:
    """All is well: the child ends and leaves the terminal alone."""
    try:  # noqa: SIM105  contextlib costs 3 ms
        os.write(write_fd, b".")
    except OSError:
        pass


def _wait(read_fd: int, fd: int, modes: list[object]) -> NoReturn:
    for number in _SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    process.silence(fd)
    if not os.read(read_fd, 1):
        time.sleep(_DYING_S)
        _mend(fd, modes)
    sys.exit(0)


def _mend(fd: int, modes: list[object]) -> None:
    """Put the terminal right; only the screen, when a shell has set up its own prompt already."""
    import termios

    now = termios.tcgetattr(fd)
    if now[3] & termios.ISIG:  # the app takes signals for keys; shells do not
        os.write(fd, RESTORE)
    else:
        put_back(fd, modes)
