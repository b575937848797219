"""Start the apps of a launch and poll them. An app runs the verb, or is a worker with an engine.

An app is resumed or cold. Each app has a supervisor, which is its parent process, and a link, which is
the socket for messages between app and launcher.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from edgeinfer.errors import (
    EdgeInferError,
    RestoreError,
    SnapshotMissingError,
    SnapshotStaleError,
    to_fields,
)
from edgeinfer.launcher import messages, selection, supervise
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.launcher.messages import LIMITS, LaunchRequest
from edgeinfer.platform import process
from edgeinfer.snapshot_format import storage


class LaunchedApp:
    """A running app with its supervisor and its link, the socket between launcher and app.

    `fds` are the descriptors of the launch request. They stay open for a cold start after a failed
    restore. `report` has the first bytes of the supervisor's next line until that line is complete.
    `is_stopped` is True while a signal such as SIGTSTP suspends the app.
    """

    def __init__(
        self, supervisor: supervise.Supervisor, request: LaunchRequest, fds: list[int]
    ) -> None:
        self.supervisor = supervisor
        self.link = supervisor.link
        self.request = request
        self.fds = fds
        self.started_s = time.monotonic()
        self.report = b""
        self.is_stopped = False

    def signal(self, number: int) -> None:
        """Send the app a signal through its supervisor; do nothing if the app has ended."""
        process.quietly(os.kill, self.supervisor.pid, number)


class Apps:
    """Starts apps, and registers their descriptors with the launcher's `poll`.

    `running` lists the apps, oldest first. `choice` says which snapshot fits the verb's app, and `fds`
    are the descriptors for that app: 0, 1, 2 and listening sockets.
    """

    choice: selection.LaunchChoice

    def __init__(self, line: CommandLine, poll: select.poll, exec_ns: int, main_ns: int) -> None:
        self.running: list[LaunchedApp] = []
        self.fds = [0, 1, 2]
        self._line = line
        self._poll = poll
        self._exec_ns = exec_ns
        self._main_ns = main_ns

    def measure_from_now(self) -> None:
        """Count the next app's start-up time from now instead of from the exec of this process."""
        self._exec_ns = self._main_ns = time.monotonic_ns()

    def start(
        self, choice: selection.LaunchChoice, request: LaunchRequest, fds: list[int]
    ) -> LaunchedApp:
        """Start an app: resumed if `choice` allows that and a snapshot fits, otherwise cold.

        If `choice.resume` is "always", the reason why no snapshot can be resumed is raised instead of a
        cold start, for example SnapshotMissingError.
        """
        if choice.resume == "never":
            reason = EdgeInferError("you asked for a cold start (--resume=never)")
            return self.start_cold(request, fds, reason)
        try:
            folder, manifest = choice.find()
            return self.start_resumed(choice, folder, manifest, request, fds)
        except EdgeInferError as error:
            reason = error
        except OSError as error:
            hint = "run `edgeinfer doctor` to see whether snapshots still work on this machine"
            reason = RestoreError(f"the snapshot could not be resumed: {error}", hint=hint)
        if choice.resume == "always":
            reason.hint = reason.hint or (None if choice.snapshot else hint_for(reason, choice))
            raise reason
        return self.start_cold(request, fds, reason, hint_for(reason, choice))

    def start_verb(self) -> LaunchedApp:
        self.choice = selection.launch_choice(self._line)
        request = LaunchRequest(role="verb", argv=tuple(self._line.argv))
        return self.start(self.choice, request, self.fds)

    def start_worker(self, app: LaunchedApp, message: messages.StartWorker) -> None:
        """Start a worker, a process with an engine, and send `app` the socket to it.

        If the worker cannot be started, `app` gets the error in a `Failed` message.
        """
        resume = "auto" if self.choice.snapshot else self.choice.resume
        choice = selection.LaunchChoice(message.model, message.requested, resume)
        request = LaunchRequest(role="worker", model=message.model, options=message.options)
        fds = [0, 1, 2]
        try:
            client_link, worker_link = _socket.socketpair()
            fds.append(worker_link.detach())
            try:
                self.start(choice, request, fds)
                # if `app` has ended, sending fails; the worker then ends, because its socket is closed
                started = messages.WorkerStarted()
                process.quietly(messages.send, app.link, started, [client_link.fileno()])
            finally:
                client_link.close()
        except (EdgeInferError, OSError) as error:
            for fd in fds[3:]:
                os.close(fd)
            if not isinstance(error, EdgeInferError):
                error = EdgeInferError(f"no worker can be started for {message.model}: {error}")
            process.quietly(messages.send, app.link, messages.Failed(error=to_fields(error)))

    def start_resumed(
        self,
        choice: selection.LaunchChoice,
        folder: str,
        manifest: storage.Manifest,
        request: LaunchRequest,
        fds: list[int],
    ) -> LaunchedApp:
        """Start to restore an app from the snapshot in `folder`, but do not wait. Raises OSError."""
        request.how, request.snapshot = "resumed", manifest.name
        request.reason, request.hint = "", choice.warm_hint
        request.spawn_ns = time.monotonic_ns()
        app = self._send_request(supervise.resume(manifest, folder), request, fds)
        # set the mtime of the lock file, which tells when the snapshot was last used: the least
        # recently used snapshots are removed first
        process.quietly(os.utime, f"{folder}/{storage.LOCK}")
        return app

    def start_cold(
        self, request: LaunchRequest, fds: list[int], error: EdgeInferError, hint: str = ""
    ) -> LaunchedApp:
        """Start an app that loads its model. `error` is the reason why no snapshot is resumed.

        If there is a `hint`, the app prints reason and hint.
        """
        request.how, request.snapshot = "cold", ""
        request.reason, request.hint = error.message, hint
        request.spawn_ns = time.monotonic_ns()
        app = self._send_request(supervise.start(), request, fds)
        self.close_sent_descriptors(app)
        return app

    def close_sent_descriptors(self, app: LaunchedApp) -> None:
        """Close the launcher's copies of a worker's sockets; a verb's stay open for its restart."""
        if app.request.role == "worker":
            for fd in app.fds[3:]:
                os.close(fd)
            del app.fds[3:]

    def _send_request(
        self, supervisor: supervise.Supervisor, request: LaunchRequest, fds: list[int]
    ) -> LaunchedApp:
        """Register a started app with `poll`, then complete its launch request and send it."""
        app = LaunchedApp(supervisor, request, fds)
        self.running.append(app)
        self._poll.register(app.supervisor.status_fd, select.POLLIN)
        self._poll.register(app.link.fileno(), select.POLLIN)
        is_verb = app.request.role == "verb"
        _describe_this_process(request)
        request.exec_ns = request.main_ns = request.spawn_ns
        if is_verb:  # a verb's launch began with this process; a worker's launch begins now
            request.exec_ns, request.main_ns = self._exec_ns, self._main_ns
        request.is_named = is_verb and bool(self.choice.snapshot)
        request.expected_model = self.choice.model
        fds = list(app.fds)
        serves = is_verb and self._line.verb == "serve"
        users = _open_user_lookup() if serves and request.how == "resumed" else None
        if users is not None:
            fds.append(users.fileno())
        # sending fails only if the app has ended; in this case, the supervisor reports the end
        process.quietly(messages.send, app.link, request, fds)
        return app

    def drop(self, app: LaunchedApp) -> None:
        self.running.remove(app)
        self._poll.unregister(app.supervisor.status_fd)
        process.quietly(self._poll.unregister, app.link.fileno())
        os.close(app.supervisor.status_fd)
        app.link.close()
        process.quietly(os.waitpid, app.supervisor.pid, 0)


def _describe_this_process(request: LaunchRequest) -> None:
    """Copy this process's environment, directory, umask, CPUs and limits to a request; add entropy."""
    import resource  # slow import (0.2 ms)

    request.umask = os.umask(0o077)
    os.umask(request.umask)
    try:
        request.cwd = os.getcwd()
    except OSError:
        request.cwd = "/"
    request.limits = {name: str(resource.getrlimit(getattr(resource, name))[0]) for name in LIMITS}
    request.env = tuple(f"{name}={value}" for name, value in os.environ.items())
    request.affinity = tuple(map(str, os.sched_getaffinity(0)))
    request.entropy = os.urandom(64)


def _open_user_lookup() -> _socket.socket | None:
    """Open the netlink socket with which a resumed endpoint asks for peers' uids; None if forbidden."""
    try:
        return _socket.socket(_socket.AF_NETLINK, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC, 4)
    except OSError:
        return None


def hint_for(error: EdgeInferError, choice: selection.LaunchChoice) -> str:
    """Return the hint of a cold start: a command that helps, or why no snapshot can be built."""
    if isinstance(error, (SnapshotMissingError, SnapshotStaleError)):
        from edgeinfer.snapshot_format import criu  # only a cold start needs this

        return criu.FILTERED if criu.is_filtered() else choice.warm_hint
    from edgeinfer import error_text  # slow import (1 ms): only before a cold start

    return error_text.hint(error)
