"""The apps of a launch: resumed or started cold, each with a supervisor and a link of its own.

Standard library only, and of that what is cheap (docs/decisions/042-what-the-launcher-imports.md).
"""

from __future__ import annotations

import _socket
import os
import select
import time

from edgeinfer.errors import EdgeInferError, SnapshotMissingError, SnapshotStaleError, to_fields
from edgeinfer.launcher import messages, process_env, selection, supervise
from edgeinfer.platform import process
from edgeinfer.snapshots import format

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


_WARM = "`edgeinfer warm` builds it now"


class App:
    """A running app: supervisor, link, and the `fds` of its request, kept for a cold start instead."""

    def __init__(self, child: supervise.Child, link: _socket.socket, role: str) -> None:
        self.child = child
        self.link = link
        self.role = role
        self.how = "cold"
        self.snapshot = ""
        self.request: dict[str, messages.Value] = {}
        self.fds: list[int] = []
        self.offers_fd: int | None = None
        self.began = time.monotonic()
        self.report = b""


class Verb:
    """The verb that was typed: its choice of a snapshot, its request, and what that carries."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.choice = selection.launch_choice(argv)
        self.request: dict[str, messages.Value] = {"role": "verb", "argv": messages.join(argv)}
        self.fds = [0, 1, 2]

    def look_again(self) -> None:
        """A word of argv that is no model's name may be one once there is a snapshot of it."""
        self.choice = selection.launch_choice(self.argv)


class Apps:
    """Starts apps, polls them, and forgets those that have ended. `running` are in order of start."""

    def __init__(self, verb: Verb, poll: select.poll, exec_ns: int, main_ns: int) -> None:
        self.running: list[App] = []
        self._verb = verb
        self._poll = poll
        self._exec_ns = exec_ns
        self._main_ns = main_ns

    def begin_again(self) -> None:
        """The launch of the next app begins now."""
        self._exec_ns = self._main_ns = time.monotonic_ns()

    def start(
        self, choice: selection.LaunchChoice, request: dict[str, messages.Value], fds: list[int]
    ) -> App:
        """Resume if wanted and possible, else start cold. Raises `choose.find`'s errors."""
        if choice.resume == "never":
            return self.cold(
                request, fds, EdgeInferError("you asked for a cold start (--resume=never)")
            )
        try:
            folder, manifest = choice.find()
            return self.resume(folder, manifest, request, fds)
        except EdgeInferError as error:
            if choice.resume == "always":
                raise
            why = error
        except OSError as error:
            why = EdgeInferError(f"the snapshot could not be resumed: {error}")
        return self.cold(request, fds, why, hint_at(why))

    def start_verb(self) -> App:
        """Start the app of the verb. Raises as `start`."""
        return self.start(self._verb.choice, self._verb.request, self._verb.fds)

    def start_worker(self, app: App, fields: dict[str, bytes]) -> None:
        """Start a process that serves an engine, and give `app` the other end of its socket."""
        theirs, ours = _socket.socketpair()
        model, options = os.fsdecode(fields["model"]), fields["options"]
        verb = self._verb.choice
        resume = "auto" if verb.snapshot else verb.resume
        choice = selection.LaunchChoice(
            model, selection.unpack_options(fields.get("requested", b"")), resume
        )
        request: dict[str, messages.Value] = {
            "role": "worker",
            "model": model,
            "options": options,
            "argv": b"",
        }
        try:
            self.start(choice, request, [0, 1, 2, ours.detach()])
        except EdgeInferError as error:
            theirs.close()
            messages.send(app.link, {"op": "refused", **to_fields(error)})
            return
        messages.send(app.link, {"op": "worker"}, [theirs.fileno()])
        theirs.close()

    def resume(
        self, folder: str, manifest: format.Manifest, request: dict[str, messages.Value], fds: list[int]
    ) -> App:
        """Begin to restore an app from this snapshot. Raises OSError."""
        ours, theirs = _socket.socketpair()
        spawn_ns = time.monotonic_ns()
        child = supervise.resume(manifest, folder, theirs.fileno())
        theirs.close()
        app = self._adopt(App(child, ours, str(request["role"])), request, fds)
        app.how, app.snapshot = "resumed", manifest.name
        self._send(app, spawn_ns, "", _WARM)
        # the last use, for the least recently used to be pruned
        quietly(os.utime, f"{folder}/{format.LOCK}")
        return app

    def cold(
        self, request: dict[str, messages.Value], fds: list[int], why: EdgeInferError, hint: str = ""
    ) -> App:
        """Start an app that loads what it needs; it tells the user why if there is a `hint`."""
        ours, theirs = _socket.socketpair()
        spawn_ns = time.monotonic_ns()
        command = process.child_command("edgeinfer.snapshots.restore.app_process", str(theirs.fileno()))
        child = supervise.start(command, theirs.fileno(), dict(os.environ))
        theirs.close()
        app = self._adopt(App(child, ours, str(request["role"])), request, fds)
        self._send(app, spawn_ns, why.message, hint)
        self.close_carried(app)
        return app

    def close_carried(self, app: App) -> None:
        """Close what a worker was given, once it has it; a verb's serves the next one too."""
        if app.role == "worker":
            for fd in app.fds[3:]:
                os.close(fd)
            del app.fds[3:]

    def _adopt(self, app: App, request: dict[str, messages.Value], fds: list[int]) -> App:
        app.request, app.fds = request, fds
        self.running.append(app)
        self._poll.register(app.child.status_fd, select.POLLIN)
        self._poll.register(app.link.fileno(), select.POLLIN)
        return app

    def _send(self, app: App, spawn_ns: int, reason: str, hint: str) -> None:
        stamps = {"exec_ns": self._exec_ns, "main_ns": self._main_ns, "spawn_ns": spawn_ns}
        if app.role == "worker":  # its launch began when it was asked for
            stamps = dict.fromkeys(stamps, spawn_ns)
        named = int(app.role == "verb" and bool(self._verb.choice.snapshot))
        how: dict[str, messages.Value] = {
            "named": named,
            "how": app.how,
            "snapshot": app.snapshot,
            "reason": reason,
            "hint": hint,
            "guess": self._verb.choice.model,
        }
        message = {"op": "launch", **app.request, **process_env.of_this_process(), **stamps, **how}
        fds = list(app.fds)
        serves = app.role == "verb" and self._verb.argv[0] == "serve"
        users = process_env.user_lookup() if serves and app.how == "resumed" else None
        if users is not None:
            fds.append(users.fileno())
        # it may be gone already: its supervisor tells why
        quietly(messages.send, app.link, message, fds)

    def forget(self, app: App) -> None:
        """Drop an app that has ended, and reap its supervisor."""
        self.running.remove(app)
        self._poll.unregister(app.child.status_fd)
        quietly(self._poll.unregister, app.link.fileno())
        os.close(app.child.status_fd)
        if app.offers_fd is not None:
            os.close(app.offers_fd)
        app.link.close()
        quietly(os.waitpid, app.child.pid, 0)


def hint_at(error: EdgeInferError) -> str:
    """What to type so that the next start is no cold one."""
    if isinstance(error, (SnapshotMissingError, SnapshotStaleError)):
        return _WARM
    from edgeinfer import error_text  # 1 ms, and only before a cold start

    return error_text.hint(error)


def quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call it, ignoring what is gone; `contextlib.suppress` costs a 3 ms import."""
    try:  # noqa: SIM105
        call(*arguments)
    except (OSError, KeyError):
        pass
