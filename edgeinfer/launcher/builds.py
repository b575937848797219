"""Start the processes that build snapshots for a launch, and keep their log."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import os
import select
import time

from edgeinfer.launcher import messages, supervise
from edgeinfer.platform import paths, process
from edgeinfer.snapshot_format import storage

#: Module that builds a snapshot in the background.
JOBS = "edgeinfer.snapshots.builder.jobs"
#: Log in the state directory: each line says which snapshot was built in the background, or why not.
LOG = "auto-warm.log"
_LOG_BYTES = 256 << 10
#: Reasons for which a background build does nothing that are not failures.
ALREADY_BUILT, BEING_BUILT = "it is already built", "another process is building it"
_NOT_BUILT = ": not built: "


class Builds:
    """Starts builds of snapshots for a launch.

    Background builds outlive the launcher; a build that a client waits for ends with the launcher.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._missing: dict[str, str] = {}
        self._builds: dict[int, int] = {}
        self._warm_pid = 0

    def note_missing(self, request: messages.WantSnapshot) -> None:
        """Remember a snapshot that would have avoided this cold start; build it now if requested."""
        self._missing[request.model] = os.fsdecode(request.options)
        if request.now:
            self.build_missing()

    def build_missing(self) -> None:
        """Build the remembered snapshots, each in its own background process."""
        while self._missing:
            model, options = self._missing.popitem()
            self.watch(detach(JOBS, model, options))

    def watch(self, pid: int) -> None:
        """Let `poll` report when a build ends, so that `has_ended` can reap it."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # kernels before 5.3 have no pidfd
            return
        self._builds[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def has_ended(self, fd: int) -> bool:
        """Return whether `fd`, which poll has reported, belongs to a build; then reap that build."""
        pid = self._builds.pop(fd, 0)
        if not pid:
            return False
        self._poll.unregister(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        return True

    def start_warm(self, argv: tuple[str, ...], fds: list[int]) -> None:
        """Run `edgeinfer warm` outside the app's namespaces; output goes to the first of `fds`."""
        self.stop_warm()
        self._warm_pid = _start(["warm", *argv], fds, (1, 2))

    def start_take(self, argv: tuple[str, ...], fds: list[int]) -> None:
        """Run `edgeinfer snapshots take` for this launch; its stdout (JSON) is the first of `fds`."""
        command = ["snapshots", "take", str(os.getpid()), "--json", "--quiet"]
        self.watch(_start([*command, *argv], fds, (1,)))

    def stop_warm(self) -> None:
        """Interrupt the `edgeinfer warm` of `start_warm` if it still runs, and wait for its end."""
        if self._warm_pid:
            process.quietly(os.kill, self._warm_pid, _signal.SIGINT)
            process.quietly(os.waitpid, self._warm_pid, 0)
            self._warm_pid = 0


def _start(command: list[str], fds: list[int], streams: tuple[int, ...]) -> int:
    """Run a verb that ends with this process; close `fds` and return its pid.

    `streams` are the standard streams (1, 2) that become the first of `fds`.
    """

    def prepare() -> None:
        process.die_with_parent()
        os.setsid()
        process.redirect_to_null()
        for stream in streams:
            os.dup2(fds[0], stream)

    pid = process.fork_and_exec(process.child_command("edgeinfer", *command), prepare)
    for fd in fds:
        os.close(fd)
    return pid


def detach(module: str, *arguments: str) -> int:
    """Start a module in its own session, which outlives this process; return its pid."""

    def prepare() -> None:
        os.setsid()
        process.redirect_to_null()
        process.close_all_but()
        for number in supervise.FORWARDED:
            _signal.signal(number, _signal.SIG_DFL)

    return process.fork_and_exec(process.child_command(module, *arguments), prepare)


def was_logged(text: str) -> bool:
    """Return whether the log of background builds contains this text."""
    return text in _read_log()


def not_built(name: str, reason: str) -> str:
    """Return the line of the log for a background build of the snapshot `name` that failed."""
    return f"{name}{_NOT_BUILT}{reason}"


def failures() -> dict[str, str]:
    """Return why the last background build of each snapshot failed, by the snapshot's name."""
    reasons: dict[str, str] = {}
    for line in _read_log().splitlines():
        text = line.partition(" ")[2]
        name, is_failure, reason = text.partition(_NOT_BUILT)
        reasons.pop(text.partition(": built in ")[0], None)
        reasons.pop(name, None)  # the last failure becomes the last entry
        if is_failure and reason not in (ALREADY_BUILT, BEING_BUILT):
            reasons[name] = reason
    return reasons


def _read_log() -> str:
    try:
        with open(log_file(), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def log(text: str) -> None:
    """Add a line to the log, after renaming a large one to auto-warm.old.log. Raises OSError."""
    path = log_file()
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    storage.refuse_unsafe(folder, directory=True)
    if os.path.exists(path) and os.path.getsize(path) > _LOG_BYTES:
        os.replace(path, path.removesuffix(".log") + ".old.log")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{stamp} {text}\n")


def log_file() -> str:
    """Return the path of the log."""
    return os.path.join(paths.base("state"), LOG)
