"""Restore the terminal after an app that died without doing so.

If the launcher is killed, its app dies too, and neither can restore the terminal. Then a forked child
restores it. The child (0.1 MB) notices the death by a pipe whose other end only the launcher has.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import os
import time

from edgeinfer.launcher import supervise
from edgeinfer.platform import process

#: Escape sequences that undo the modes of a full-screen app: alternate screen, hidden cursor, no
#: wrapping, colours, and reports of mouse, focus, paste and keys.
RESTORE = (
    b"\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2048l"
    b"\x1b[<u\x1b[0m\r\n"
)
#: Time (s) that a dying app gets for its last output before the terminal is restored.
_DYING_S = 0.1
#: Signals that the child of `watch` ignores, because the child must outlive the launcher.
_IGNORED = (*supervise.FORWARDED, _signal.SIGTTOU, _signal.SIGTTIN)


class Terminal:
    """The launcher's terminal, with the modes that it had before the app was started.

    If the launcher has no terminal, the methods do nothing.
    """

    def __init__(self) -> None:
        self._fd = next((fd for fd in (1, 2, 0) if os.isatty(fd)), -1)
        self._modes = _modes_of(self._fd) if self._fd >= 0 else None
        self._guard = -1

    def watch(self) -> None:
        """Fork the child that restores the terminal if this process is killed."""
        if self._modes is None:
            return
        read_fd, self._guard = os.pipe()
        if os.fork() == 0:
            try:
                os.close(self._guard)
                self._restore_after_death(read_fd)
            finally:
                os._exit(0)
        os.close(read_fd)

    def is_in_foreground(self) -> bool:
        """Return whether this process is in the terminal's foreground process group."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def dismiss_guard(self) -> None:
        """End the child that `watch` forked, without restoring the terminal."""
        process.quietly(os.write, self._guard, b".")

    def restore(self) -> None:
        """Restore the terminal's modes from before the app, and leave the app's full screen."""
        if self._modes is None:
            return
        import termios

        try:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)  # type: ignore[arg-type]
            os.write(self._fd, RESTORE)
        except (termios.error, OSError):
            pass

    def _restore_after_death(self, read_fd: int) -> None:
        """Wait for the launcher's end; restore the terminal unless `dismiss_guard` was called."""
        for number in _IGNORED:
            _signal.signal(number, _signal.SIG_IGN)
        process.redirect_to_null(self._fd)
        if os.read(read_fd, 1):
            return
        time.sleep(_DYING_S)
        import termios

        # with the mode ISIG, Ctrl-C sends a signal; a full-screen app switches it off. If ISIG is on,
        # the shell has already set its own modes, and only the screen must be restored
        if termios.tcgetattr(self._fd)[3] & termios.ISIG:
            os.write(self._fd, RESTORE)
        else:
            self.restore()


def _modes_of(fd: int) -> list[object] | None:
    import termios  # slow import (0.1 ms)

    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None
