"""A Textual driver for a terminal that need not be this process's controlling terminal.

A process resumed from a snapshot gets a terminal as descriptors, and signals from the launcher. So this
driver reads, writes and measures by descriptor. Ctrl-Z also stops the launcher, because the shell waits
for the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import threading
from array import array
from codecs import getincrementaldecoder
from typing import Any, ClassVar, TextIO

from textual.drivers.linux_driver import LinuxDriver

from edgeinfer.tui.textual_internals import XTermParser


class TerminalDriver(LinuxDriver):
    """Textual's LinuxDriver, which draws on `out`, the terminal that `claim_terminal` returned."""

    out: ClassVar[TextIO | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.out is not None:
            self._file: Any = self.out
        self._waker: tuple[int, int] | None = None
        self._parser = XTermParser(self._debug)
        self._decode = getincrementaldecoder("utf-8")(errors="replace").decode
        self._is_ready = threading.Event()
        self._n_early = 0

    def _get_terminal_size(self) -> tuple[int, int]:
        """Return (columns, rows) of the window; COLUMNS and LINES date from the start of the shell."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self.fileno)
            if columns > 0 and rows > 0:
                return columns, rows
        return 80, 24

    def start_application_mode(self) -> None:
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._n_early = self._waiting_bytes()

    def _waiting_bytes(self) -> int:
        """Return the number of bytes typed before raw mode, when Enter still gave a newline."""
        count = array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fileno, termios.FIONREAD, count)
        return count[0]

    def ready(self) -> None:
        """Let the input thread begin to read keys. Called when the first widget can receive keys."""
        self._is_ready.set()

    def run_input_thread(self) -> None:
        """Read keys until `exit_event` is set.

        Textual's method ends up to 0.1 s after that; this one ends at once. Bytes that are not UTF-8
        are accepted. If the terminal is closed, the app ends without an error.
        """
        self._waker = os.pipe()
        poller = select.poll()
        for fd in (self.fileno, self._waker[0]):
            poller.register(fd, select.POLLIN)
        while not self.exit_event.is_set():
            if not self._is_ready.wait(0.1):
                continue
            ready = dict(poller.poll(100))
            if self.fileno in ready:
                data = self._read()
                if not data:
                    self._app.call_later(self._app.action_quit)
                    return
                if self._n_early > 0:
                    early, data = data[: self._n_early], data[self._n_early :]
                    self._n_early -= len(early)
                    data = early.replace(b"\n", b"\r") + data
                for event in self._parser.feed(self._decode(data)):
                    self.process_message(event)
            for event in self._parser.tick():
                self.process_message(event)

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, 4096)
        except OSError:
            return b""

    def disable_input(self) -> None:
        """Stop reading keys. The reading thread is woken, so that it ends at once."""
        self._stop_reading()
        with contextlib.suppress(ValueError):  # only the main thread may set signal handlers
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        self._disable_mouse_support()
        with contextlib.suppress(termios.error):
            termios.tcflush(self.fileno, termios.TCIFLUSH)

    def _stop_reading(self) -> None:
        self.exit_event.set()
        if self._waker is not None:
            os.write(self._waker[1], b"!")
        if self._key_thread is not None and self._key_thread is not threading.current_thread():
            self._key_thread.join()
            self._key_thread = None
            # close the pipe here: the thread that reads keys may end before the byte is written to the
            # pipe
            for fd in self._waker or ():
                os.close(fd)
            self._waker = None
        self.exit_event.clear()

    def _sigtstp_application(self, *_: object) -> None:
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        if os.getsid(0) == os.getpid():  # the launcher, which started this process, then stops too
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            # stop every process of the shell's job, because the shell may wait for any of them
            os.killpg(0, signal.SIGSTOP)


def claim_terminal() -> TextIO | None:
    """Return a stream that writes to the terminal; None if there is no terminal.

    The terminal is the first one among stdout, stderr and stdin; it need not be the controlling one. If
    stdin is not a terminal but, for example, a pipe, descriptor 0 becomes the terminal.
    """
    fd = next((n for n in (1, 2, 0) if os.isatty(n)), None)
    if fd is None:
        return None
    if not os.isatty(0):
        os.dup2(fd, 0)  # a terminal's descriptor can be read and written, however it was opened
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    return open(os.dup(fd), "w", encoding="utf-8", errors="replace")
