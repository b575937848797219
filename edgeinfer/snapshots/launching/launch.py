"""Start the app of a verb that needs a model, stand in for it, end as it ended.

One loop over pipes and sockets. An app is resumed from a snapshot or started cold; either way it has a
supervisor that reports on a pipe, and a link on which it may ask for workers (`{"op": "worker"}`), name
the snapshot that would have helped (`"warm"`), and say that it has ended (`"exit"`). A `serve` that
started cold is succeeded by a resumed one when its snapshot is built (`hand_over`).

Standard library only, and of that what is cheap (docs/decisions/042-what-the-launcher-imports.md).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms
import _socket
import os
import select
import sys
import time

from edgeinfer import process
from edgeinfer.errors import EdgeInferError, SnapshotMissingError, SnapshotStaleError, to_fields
from edgeinfer.snapshots import frames
from edgeinfer.snapshots.launching import guard, hand_over, supervise, surroundings
from edgeinfer.snapshots.shelf import choose, format

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from edgeinfer.snapshots.launching import kept_connections

#: Signals after which an app that ended was asked to, and is not started again.
_ASKED_TO_END = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
#: Seconds to wait before `serve`'s app is resumed again, by how many crashes there were in a row.
_BACK_OFF_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
#: An app that lived so long had a healthy start: the next crash is the first again.
_HEALTHY_S = 60.0
#: The exit code of an exception nobody foresaw (`cli.main`); `serve` survives it like a signal.
_UNEXPECTED = 70


class App:
    """A running app: its supervisor and its link.

    `fds` are what its request carries, kept for a cold start after a resume that failed.
    """

    def __init__(self, child: supervise.Child, link: _socket.socket, role: str) -> None:
        self.child = child
        self.link = link
        self.role = role
        self.how = "cold"
        self.snapshot = ""
        self.restored = False
        self.request: dict[str, frames.Value] = {}
        self.copies: kept_connections.Kept | None = None
        self.fds: list[int] = []
        self.offers_fd: int | None = None
        self.began = time.monotonic()
        self.report = b""


class Launcher:
    """One launch of one verb."""

    def __init__(self, argv: list[str], exec_ns: int, main_ns: int) -> None:
        self.argv = argv
        self._exec_ns = exec_ns
        self._main_ns = main_ns
        self._apps: list[App] = []
        self._main: App | None = None
        self._successor: App | None = None
        self._code: int | None = None
        self._listeners: list[_socket.socket] = []
        self._warm: dict[bytes, dict[str, bytes]] = {}
        self._asked_to_end = False
        self._warming = 0
        self._crashes = 0
        self._terminal_fd = guard.terminal()
        self._terminal = _terminal_modes(self._terminal_fd)
        self._guard: int | None = None
        self._poll = select.poll()
        self._builds = hand_over.Builds(self._poll)

    # --- starting

    def run(self) -> NoReturn:
        """Never returns."""
        choice = choose.launch_choice(self.argv)
        for number in supervise.FORWARDED:
            _signal.signal(number, self._forward)
        if self.argv[0] == "serve":
            self._listeners = surroundings.listen(self.argv)
        if self.argv[0] == "chat" and self._terminal is not None and self._terminal_fd is not None:
            self._guard = guard.watch(self._terminal_fd, self._terminal)
        request: dict[str, frames.Value] = {"role": "verb", "argv": frames.join(self.argv)}
        fds = [0, 1, 2, *(listener.fileno() for listener in self._listeners)]
        self._verb = (choice, request, fds)
        try:
            self._main = self._start(choice, request, fds)
        except EdgeInferError as error:
            _fail(error)
        while True:
            self._turn()

    def _start(
        self, choice: choose.LaunchChoice, request: dict[str, frames.Value], fds: list[int]
    ) -> App:
        """Resume if wanted and possible, else start cold. Raises `choose.find`'s errors."""
        reason = "you asked for a cold start (--resume=never)"
        if choice.resume != "never":
            try:
                folder, manifest = choice.find()
                return self._resume(folder, manifest, request, fds)
            except EdgeInferError as error:
                if choice.resume == "always":
                    raise
                reason = self._explain(error, str(request["role"]))
            except OSError as error:
                reason = self._explain(
                    EdgeInferError(f"the snapshot could not be resumed: {error}"), str(request["role"])
                )
        return self._cold(request, fds, reason)

    def _resume(
        self, folder: str, manifest: format.Manifest, request: dict[str, frames.Value], fds: list[int]
    ) -> App:
        ours, theirs = _socket.socketpair()
        spawn_ns = time.monotonic_ns()
        child = supervise.resume(manifest, folder, theirs.fileno())
        theirs.close()
        app = self._adopt(App(child, ours, str(request["role"])), request, fds)
        app.how, app.snapshot = "resumed", manifest.name
        self._send(app, spawn_ns, "")
        # the last use, for the least recently used to be pruned
        _quietly(os.utime, f"{folder}/{format.LOCK}")
        return app

    def _cold(self, request: dict[str, frames.Value], fds: list[int], reason: str) -> App:
        ours, theirs = _socket.socketpair()
        spawn_ns = time.monotonic_ns()
        command = process.child_command("edgeinfer.snapshots.resumed.app_process", str(theirs.fileno()))
        child = supervise.start(command, theirs.fileno(), dict(os.environ))
        theirs.close()
        app = self._adopt(App(child, ours, str(request["role"])), request, fds)
        app.restored = True
        self._send(app, spawn_ns, reason)
        if app.role == "worker":
            _close_all(app.fds)
        return app

    def _adopt(self, app: App, request: dict[str, frames.Value], fds: list[int]) -> App:
        app.request, app.fds = request, fds
        self._apps.append(app)
        self._poll.register(app.child.status_fd, select.POLLIN)
        self._poll.register(app.link.fileno(), select.POLLIN)
        return app

    def _send(self, app: App, spawn_ns: int, reason: str) -> None:
        stamps = {"exec_ns": self._exec_ns, "main_ns": self._main_ns, "spawn_ns": spawn_ns}
        if app.role == "worker":  # its launch began when it was asked for
            stamps = dict.fromkeys(stamps, spawn_ns)
        named = int(app.role == "verb" and bool(self._verb[0].snapshot))
        how: dict[str, frames.Value] = {
            "named": named,
            "how": app.how,
            "snapshot": app.snapshot,
            "reason": reason,
        }
        message = {"op": "launch", **app.request, **surroundings.of_this_process(), **stamps, **how}
        # it may be gone already: its supervisor tells why
        _quietly(frames.send, app.link, message, app.fds)

    def _explain(self, error: EdgeInferError, role: str) -> str:
        """Write a cold start's reason and fix to stderr; a chat shows it in its status line."""
        reason = error.message
        if role == "verb" and self.argv[0] != "chat":
            if isinstance(error, (SnapshotMissingError, SnapshotStaleError)):
                fix = "it is built when this ends; `edgeinfer warm` does it now"
            else:
                from edgeinfer import error_text  # 1 ms, and only before a cold start

                fix = error_text.hint(error)
            sys.stderr.write(f"edgeinfer: cold start: {reason} ({fix})\n")
        return reason

    # --- running

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it. Signals are handled in between."""
        # one that starts meanwhile may have a descriptor that was another's at the poll
        apps = list(self._apps)
        for fd, _ in self._poll.poll():
            if self._builds.has_ended(fd):
                self._offer()
                continue
            for app in apps:
                if app not in self._apps:
                    continue
                if fd == app.child.status_fd:
                    self._read_supervisor(app)
                elif fd == app.link.fileno():
                    self._read_app(app)
                elif app.copies is not None and fd == app.copies.fileno() and not app.copies.receive():
                    self._poll.unregister(fd)

    def _forward(self, number: int, _frame: object) -> None:
        """Pass a signal on to the app. A stop stops this process when the app has stopped."""
        self._asked_to_end |= number in _ASKED_TO_END
        for app in self._apps:
            if app.role == "verb" or number == _signal.SIGCONT:
                _quietly(os.kill, app.child.pid, number)
        if self._main is None and number in _ASKED_TO_END:
            _die_of(number)

    def _read_supervisor(self, app: App) -> None:
        data = os.read(app.child.status_fd, 4096)
        app.report += data
        *lines, app.report = app.report.split(b"\n")
        for line in lines:
            self._reported(app, line.decode(errors="replace"))
        if not data and app in self._apps:
            self._ended(app, "signal 9")

    def _reported(self, app: App, line: str) -> None:
        what, _, rest = line.partition(" ")
        if what == "restored":
            app.restored = True
            _close_all(app.fds if app.role == "worker" else [])
        elif what == "stopped" and app is self._main:
            os.kill(0, _signal.SIGSTOP)  # our group: what the shell waits for
        elif what == "failed":
            self._failed(app, rest)
        elif what in ("exit", "signal"):
            self._ended(app, line)

    def _failed(self, app: App, why: str) -> None:
        """A restore failed, which the manifest did not foresee: start cold, with the same request."""
        self._forget(app)
        if app is self._successor:
            self._stay(why)
            return
        if app.how == "cold":
            self._finish(app, f"exit {_UNEXPECTED}", why)
            return
        if self._verb[0].resume == "always" and app.role == "verb":
            _fail(
                EdgeInferError(
                    f"the snapshot could not be resumed: {why}", hint="build it again: `edgeinfer warm`"
                )
            )
        reason = self._explain(
            EdgeInferError(f"CRIU could not restore the snapshot: {why[:300]}"), app.role
        )
        again = self._cold(app.request, app.fds, reason)
        if app is self._main:
            self._main = again

    def _ended(self, app: App, how: str) -> None:
        self._forget(app)
        if app is self._main:
            self._finish(app, how)
        elif app is self._successor:
            self._stay(how)
        elif self._code is not None:
            self._leave(self._code)

    def _forget(self, app: App) -> None:
        self._apps.remove(app)
        self._poll.unregister(app.child.status_fd)
        if app.copies is not None:
            _quietly(self._poll.unregister, app.copies.fileno())
            app.copies.send_replies()
        _quietly(self._poll.unregister, app.link.fileno())
        os.close(app.child.status_fd)
        if app.offers_fd is not None:
            os.close(app.offers_fd)
        app.link.close()
        _quietly(os.waitpid, app.child.pid, 0)

    def _read_app(self, app: App) -> None:
        received = frames.receive(app.link)
        if received is None:
            self._poll.unregister(app.link.fileno())
            return
        fields, _ = received
        op = fields.get("op", b"")
        if op == b"exit" and app is self._main:
            code = int(fields["code"])
            if not (self._listeners and code == _UNEXPECTED and not self._asked_to_end):
                self._leave(code)
        elif op == b"worker":
            self._worker(app, fields)
        elif op == b"copies":
            from edgeinfer.snapshots.launching import kept_connections  # 0.3 ms, while `serve` starts

            app.copies = kept_connections.Kept(received[1], fields["replies"].split(b"\0"))
            self._poll.register(app.copies.fileno(), select.POLLIN)
        elif op == b"hand-over":
            app.offers_fd = received[1][0]
        elif op == b"idle" and app is self._main:
            self._start_successor()
        elif op == b"ready" and app is self._successor:
            self._hand_over(app)
        elif op == b"warm-now":
            self._warm_now(app, fields, received[1])
        elif op == b"warm-stop":
            self._warm_stop()
        elif op == b"warm":
            self._warm[fields["model"]] = fields
            if fields["now"] == b"1":
                self._warm_later()

    def _worker(self, app: App, fields: dict[str, bytes]) -> None:
        """Start a process that serves an engine, and give the app the other end of its socket."""
        theirs, ours = _socket.socketpair()
        model, options = os.fsdecode(fields["model"]), fields["options"]
        resume = "auto" if self._verb[0].snapshot else self._verb[0].resume
        choice = choose.LaunchChoice(model, choose.unpack_options(fields.get("requested", b"")), resume)
        request: dict[str, frames.Value] = {
            "role": "worker",
            "model": model,
            "options": options,
            "argv": b"",
        }
        try:
            self._start(choice, request, [0, 1, 2, ours.detach()])
        except EdgeInferError as error:
            theirs.close()
            frames.send(app.link, {"op": "refused", **to_fields(error)})
            return
        frames.send(app.link, {"op": "worker"}, [theirs.fileno()])
        theirs.close()

    def _warm_now(self, app: App, fields: dict[str, bytes], fds: list[int]) -> None:
        """Run `edgeinfer warm` outside the app's namespaces; its talk goes to `fds`."""
        self._warm_stop()

        def prepare() -> None:
            process.die_with_parent()
            os.setsid()
            process.silence()
            for stream in (1, 2):
                os.dup2(fds[0], stream)

        command = process.child_command("edgeinfer", "warm", *frames.split(fields["argv"]))
        self._warming = process.fork_and_exec(command, prepare)
        for fd in fds:
            os.close(fd)

    def _warm_stop(self) -> None:
        """Stop the warming an app asked for, if it still runs."""
        if self._warming:
            _quietly(os.kill, self._warming, _signal.SIGINT)
            _quietly(os.waitpid, self._warming, 0)
            self._warming = 0

    # --- handing over

    def _offer(self) -> None:
        """Offer the app a successor, when there is a snapshot now that fits its launch."""
        # a word of argv that is no model's name until there is a snapshot of it
        choice = choose.launch_choice(self.argv)
        self._verb = (choice, *self._verb[1:])
        main = self._main
        if main is None or main.offers_fd is None or choice.resume == "never":
            return
        try:
            choice.find()
        except (EdgeInferError, OSError):
            return
        _quietly(os.write, main.offers_fd, hand_over.OFFER)

    def _start_successor(self) -> None:
        """Resume the verb a second time, with the same listening sockets."""
        choice, request, fds = self._verb
        if self._asked_to_end or self._successor is not None:
            return
        self._exec_ns = self._main_ns = time.monotonic_ns()
        try:
            folder, manifest = choice.find()
            self._successor = self._resume(folder, manifest, request | {"succeeds": 1}, fds)
        except (EdgeInferError, OSError) as error:
            self._stay(str(error))

    def _hand_over(self, successor: App) -> None:
        """Make the successor the verb's app; the first one goes when its clients have gone."""
        first = self._main
        self._main = successor
        self._successor = None
        if first is not None and first.offers_fd is not None:
            _quietly(os.write, first.offers_fd, hand_over.LEAVE)

    def _stay(self, why: str) -> None:
        """There is no successor: the app goes on as if nothing had been."""
        self._successor = None
        if not self._asked_to_end:
            sys.stderr.write(f"edgeinfer: no hand-over to the snapshot: {why[:300]}\n")
            sys.stderr.flush()

    def _is_succeeded(self) -> bool:
        """Whether an app that was succeeded still has clients."""
        ours = (self._main, self._successor)
        return any(app.role == "verb" and app not in ours for app in self._apps)

    # --- ending

    def _finish(self, app: App, how: str, why: str = "") -> None:
        """The app of the verb has ended: again for a `serve` that crashed, else end like it."""
        what, _, number = how.partition(" ")
        crashed = what == "signal" or int(number) == _UNEXPECTED
        if crashed:
            self._restore_terminal()
        if crashed and self._listeners and not self._asked_to_end:
            self._again(app, how)
            return
        if what == "exit":
            self._leave(int(number))
            return
        if int(number) not in (
            _signal.SIGINT,
            _signal.SIGTERM,
            _signal.SIGHUP,
            _signal.SIGQUIT,
            _signal.SIGPIPE,
        ):
            sys.stderr.write(
                f"\nedgeinfer: the app was killed by signal {number}{f' ({why})' if why else ''}\n"
            )
            sys.stderr.flush()
            self._leave(128 + int(number))
            return
        self._dismiss_guard()
        _die_of(int(number))

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            guard.dismiss(self._guard)

    def _restore_terminal(self) -> None:
        if self._terminal is not None and self._terminal_fd is not None:
            guard.put_back(self._terminal_fd, self._terminal)

    def _again(self, app: App, how: str) -> None:
        if self._successor is not None:
            _quietly(os.kill, self._successor.child.pid, _signal.SIGKILL)
        alive_s = time.monotonic() - app.began
        self._crashes = 1 if alive_s > _HEALTHY_S else self._crashes + 1
        wait_s = _BACK_OFF_S[min(self._crashes, len(_BACK_OFF_S)) - 1]
        sys.stderr.write(
            f"edgeinfer: the app ended ({how}) after {alive_s:.1f} s; starting it again in {wait_s:g} "
            f"s\n"
        )
        sys.stderr.flush()
        self._main = None
        if wait_s:
            time.sleep(wait_s)
        self._exec_ns = self._main_ns = time.monotonic_ns()
        choice, request, fds = self._verb
        self._main = self._start(choice, request, fds)

    def _leave(self, code: int) -> None:
        """End, as soon as no client is left to an app that was succeeded."""
        self._code = code
        if self._is_succeeded():
            return
        self._dismiss_guard()
        self._warm_later()
        os._exit(code)

    def _warm_later(self) -> None:
        """Build the snapshots that would have helped, each in a process that nobody waits for."""
        while self._warm:
            _, fields = self._warm.popitem()
            self._builds.start(fields["model"], fields["options"])


def launch(argv: list[str], exec_ns: int, main_ns: int) -> NoReturn:
    """Run the verb in a process that is resumed or started for it. Never returns."""
    Launcher(argv, exec_ns, main_ns).run()


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call it, ignoring what is gone; `contextlib.suppress` costs a 3 ms import."""
    try:  # noqa: SIM105
        call(*arguments)
    except (OSError, KeyError):
        pass


def _close_all(fds: list[int]) -> None:
    for fd in fds[3:]:
        os.close(fd)
    del fds[3:]


def _terminal_modes(fd: int | None) -> list[object] | None:
    """The terminal's modes before the app, to be put back when it dies without doing so."""
    if fd is None:
        return None
    import termios  # 0.1 ms

    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None


def _fail(error: EdgeInferError) -> NoReturn:
    from edgeinfer import error_text

    sys.stderr.write(error_text.describe_error(error) + "\n")
    sys.stderr.flush()
    os._exit(error_text.exit_code(error))


def _die_of(number: int) -> NoReturn:
    """End by this signal, so that whoever waits for us sees what the app died of."""
    _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
