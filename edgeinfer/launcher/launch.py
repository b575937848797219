"""Run a launch: start the app of a verb, relay signals and messages, and end as the app ends.

One loop polls the pipes on which supervisors report, and the links on which apps send messages.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import gc
import os
import select
import sys
import time

from edgeinfer.errors import EdgeInferError, RestoreError
from edgeinfer.launcher import builds, messages, selection, supervise
from edgeinfer.launcher.apps import Apps, LaunchedApp, hint_for
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.launcher.terminal import Terminal
from edgeinfer.platform import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

#: Pause (s) before `serve` starts its app again, by the number of consecutive crashes.
_BACK_OFF_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
#: If an app has run longer than this (s), its crash counts as the first: the next app starts at once.
_HEALTHY_S = 60.0
#: Signals by which a user ends a process. An app that such a signal ended is not restarted.
_ASKED_TO_END = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
#: Exit code after an unexpected exception (`cli.main`). `serve` restarts an app that ends with it, but
#: not if the first app does so within `_HEALTHY_S`: later apps would fail in the same way.
_UNEXPECTED = 70


class Launcher:
    """The launcher of a verb: it starts the verb's app, answers its messages, and forwards signals."""

    def __init__(self, line: CommandLine, exec_ns: int, main_ns: int) -> None:
        self._line = line
        self._main: LaunchedApp | None = None
        self._asked_to_end = False
        self._is_suspending = False
        self._crashes = 0
        self._terminal = Terminal()
        self._poll = select.poll()
        self._apps = Apps(line, self._poll, exec_ns, main_ns)
        self._builds = builds.Builds(self._poll)

    def run(self) -> NoReturn:
        """Start the app and handle messages until the app ends; then exit with its exit code."""
        for number in supervise.FORWARDED:
            _signal.signal(number, self._forward)
        if self._line.verb == "serve":
            try:
                self._apps.fds += listen(self._line)
            except EdgeInferError as error:
                _fail(error)
        if self._line.verb == "chat":
            self._terminal.watch()
        self._start_verb()
        gc.enable()
        while True:
            self._handle_events()

    def _start_verb(self) -> None:
        try:
            self._main = self._apps.start_verb()
        except EdgeInferError as error:
            _fail(error)

    @property
    def _serves(self) -> bool:
        """Return whether listening sockets exist, on which clients can wait during a restart."""
        return len(self._apps.fds) > 3

    # --- running

    def _handle_events(self) -> None:
        # go through a copy, without apps that this loop starts: a new app may get a descriptor number
        # that poll has reported for an ended app
        apps = list(self._apps.running)
        for fd, _ in self._poll.poll():
            if self._builds.has_ended(fd):
                continue
            for app in apps:
                if app not in self._apps.running:
                    continue
                if fd == app.supervisor.status_fd:
                    self._read_supervisor(app)
                elif fd == app.link.fileno():
                    self._read_app(app)

    def _forward(self, number: int, _frame: object) -> None:
        """Forward a signal to the app. After Ctrl-Z, this process stops only once the app has."""
        self._asked_to_end |= number in _ASKED_TO_END
        self._is_suspending |= number == _signal.SIGTSTP
        for app in self._apps.running:
            if app.request.role == "verb" or number == _signal.SIGCONT:
                app.signal(number)
            if app.is_stopped and number in _ASKED_TO_END:
                app.signal(_signal.SIGCONT)  # a suspended app ends only after SIGCONT
            app.is_stopped &= number != _signal.SIGCONT
        if self._main is None and number in _ASKED_TO_END:
            _end_by_signal(number)

    def _read_supervisor(self, app: LaunchedApp) -> None:
        data = os.read(app.supervisor.status_fd, 4096)
        app.report += data
        *lines, app.report = app.report.split(b"\n")
        for line in lines:
            self._handle_report(app, line.decode(errors="replace"))
        if not data and app in self._apps.running:
            self._handle_end(app, "signal 9")

    def _handle_report(self, app: LaunchedApp, line: str) -> None:
        event, _, detail = line.partition(" ")
        if event == "restored":
            self._apps.close_sent_descriptors(app)
        elif event == "stopped":
            app.is_stopped = True
            if app is self._main:
                self._stop()
            elif self._asked_to_end:
                app.signal(_signal.SIGCONT)
        elif event == "failed":
            self._handle_failure(app, detail)
        elif event in ("exit", "signal"):
            self._handle_end(app, line)

    def _stop(self) -> None:
        """Stop this process, because the app has stopped after Ctrl-Z."""
        if self._is_suspending:
            self._is_suspending = False
            os.kill(os.getpid(), _signal.SIGSTOP)
        elif self._line.verb == "chat" and self._terminal.is_in_foreground():
            os.kill(0, _signal.SIGSTOP)  # the whole group: the shell waits until all its members stop

    def _handle_failure(self, app: LaunchedApp, reason: str) -> None:
        """After a failed restore, start the app cold with the same request."""
        self._apps.drop(app)
        if app.request.how == "cold":
            self._finish(app, f"exit {_UNEXPECTED}", reason)
            return
        error = RestoreError(f"CRIU could not restore the snapshot: {reason[:300]}")
        if self._apps.choice.resume == "always" and app.request.role == "verb":
            _fail(error)
        cold_app = self._apps.start_cold(
            app.request, app.fds, error, hint_for(error, self._apps.choice)
        )
        if app is self._main:
            self._main = cold_app

    def _handle_end(self, app: LaunchedApp, ending: str) -> None:
        self._apps.drop(app)
        if app is self._main:
            self._finish(app, ending)

    def _read_app(self, app: LaunchedApp) -> None:
        received = messages.receive(app.link)
        if received is None:
            self._poll.unregister(app.link.fileno())
            return
        message, fds = received
        if isinstance(message, messages.Exit) and app is self._main:
            if not (self._serves and message.code == _UNEXPECTED and not self._asked_to_end):
                self._exit(message.code)
        elif isinstance(message, messages.StartWorker):
            self._apps.start_worker(app, message)
        elif isinstance(message, messages.WarmNow):
            self._builds.start_warm(message.argv, fds)
        elif isinstance(message, messages.StopWarming):
            self._builds.stop_warm()
        elif isinstance(message, messages.TakeSnapshot):
            self._builds.start_take(message.argv, fds)
        elif isinstance(message, messages.WantSnapshot):
            self._builds.note_missing(message)

    # --- ending

    def _finish(self, app: LaunchedApp, ending: str, reason: str = "") -> None:
        """Restart the app of `serve` after a crash, or exit like the app ("exit N", "signal N")."""
        event, _, text = ending.partition(" ")
        number = int(text)
        crashed = event == "signal" or number == _UNEXPECTED
        if crashed:
            self._terminal.restore()
        is_first_start = not self._crashes and time.monotonic() - app.started_s < _HEALTHY_S
        may_recover = event == "signal" or not is_first_start
        if crashed and self._serves and not self._asked_to_end and may_recover:
            self._restart(app, ending)
            return
        if event == "exit":
            self._exit(number)
            return
        if number not in (*_ASKED_TO_END, _signal.SIGPIPE):
            explanation = f" ({reason})" if reason else ""
            _say(f"\nedgeinfer: the app was killed by signal {number}{explanation}")
            self._exit(128 + number)
            return
        self._terminal.dismiss_guard()
        _end_by_signal(number)

    def _restart(self, app: LaunchedApp, ending: str) -> None:
        alive_s = time.monotonic() - app.started_s
        self._crashes = 1 if alive_s > _HEALTHY_S else self._crashes + 1
        wait_s = _BACK_OFF_S[min(self._crashes, len(_BACK_OFF_S)) - 1]
        message = f"edgeinfer: the app ended ({ending}) after {alive_s:.1f} s"
        _say(f"{message}; starting it again in {wait_s:g} s")
        self._main = None
        if wait_s:
            time.sleep(wait_s)
        self._apps.measure_from_now()
        self._start_verb()

    def _exit(self, code: int) -> None:
        self._terminal.dismiss_guard()
        if code == 0:
            self._builds.build_missing()
        os._exit(code)


def listen(line: CommandLine) -> list[int]:
    """Listen for `serve` before the model is loaded, so that clients can connect and wait.

    Returns the listening sockets' descriptors. If an address cannot be bound, the socket is missing:
    the app tries to bind the address again and reports the error. Raises ServeError if a socket passed
    by systemd does not listen.
    """
    from edgeinfer.platform import listening  # only `serve` needs this import

    serve = selection.read_config().get("serve", {})
    descriptors = listening.activated_sockets()
    try:
        if not descriptors:
            host = line.value("--host", serve.get("host", listening.HOST))
            port = line.value("--port", serve.get("port", listening.PORT))
            descriptors += listening.bind(host, int(port))
        if line.has("--ollama") or serve.get("ollama"):
            descriptors += listening.bind(paths.OLLAMA_HOST, paths.ollama_port())
    except (EdgeInferError, ValueError):
        pass
    return descriptors


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _fail(error: EdgeInferError) -> NoReturn:
    """Print an error that prevents the start of an app, and exit with the error's code."""
    from edgeinfer import error_text  # slow import (1 ms)

    _say(error_text.describe_error(error))
    os._exit(error_text.exit_code(error))


def _end_by_signal(number: int) -> NoReturn:
    """End this process by the signal that ended its app, so that the parent sees that signal."""
    _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
