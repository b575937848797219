"""Start processes that build snapshots for a launch, and read and write their log."""

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
#: Log file in the state directory. Each line says that a background build succeeded, or why it did not.
LOG = "auto-warm.log"
_LOG_BYTES = 256 << 10
#: Reasons why a background build has nothing to do. In the log, they do not count as failures.
ALREADY_BUILT, BEING_BUILT = "it is already built", "another process is building it"
SWITCHED_OFF = "switched off (snapshots.auto-warm)"
#: Parts of the log line of a failed build, which is `NAME: not built: REASON; again: COMMAND`.
_NOT_BUILT, _AGAIN = ": not built: ", "; again: "
_STAMP = "%Y-%m-%dT%H:%M:%S%z"


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
        """Note the snapshot that would have avoided this cold start; if `request.now`, build it now."""
        self._missing[request.model] = os.fsdecode(request.options)
        if request.now:
            self.build_missing()

    def build_missing(self) -> None:
        """Build the noted snapshots, each in its own background process."""
        while self._missing:
            model, options = self._missing.popitem()
            self.watch(detach(JOBS, model, options))

    def watch(self, pid: int) -> None:
        """Let the launcher's poll report the end of the build `pid`, so that `has_ended` reaps it."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # kernels before 5.3 have no pidfd
            return
        self._builds[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def has_ended(self, fd: int) -> bool:
        """Return whether the readable `fd` is a build's pidfd; if so, reap the ended build."""
        pid = self._builds.pop(fd, 0)
        if not pid:
            return False
        self._poll.unregister(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        return True

    def start_warm(self, argv: tuple[str, ...], fds: list[int]) -> None:
        """Start `edgeinfer warm` with `argv` outside the app's namespaces; first end an earlier one.

        `fds[0]` gets the command's stdout and stderr. All `fds` are closed in this process.
        """
        self.stop_warm()
        self._warm_pid = _start(["warm", *argv], fds, (1, 2))

    def start_take(self, argv: tuple[str, ...], fds: list[int]) -> None:
        """Start `edgeinfer snapshots take` with `argv` for this launch; `fds[0]` gets stdout (JSON)."""
        command = ["snapshots", "take", str(os.getpid()), "--json", "--quiet"]
        self.watch(_start([*command, *argv], fds, (1,)))

    def stop_warm(self) -> None:
        """Interrupt the command that `start_warm` started, if it still runs, and wait for its end."""
        if self._warm_pid:
            process.quietly(os.kill, self._warm_pid, _signal.SIGINT)
            process.quietly(os.waitpid, self._warm_pid, 0)
            self._warm_pid = 0


def _start(command: list[str], fds: list[int], streams: tuple[int, ...]) -> int:
    """Start `edgeinfer COMMAND`, which dies with this process; close `fds`, return the child's pid.

    `streams` are the child's standard streams (1, 2) that become `fds[0]`; the others are /dev/null.
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
    """Start a module in a new session, so that it outlives this process; return the child's pid."""

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


def not_built(name: str, reason: str, command: str) -> str:
    """Return the log's line for a failed build of the snapshot `name`; `command` repeats the build."""
    return f"{name}{_NOT_BUILT}{reason}{_AGAIN}{command}"


def failures() -> dict[str, tuple[str, str]]:
    """Return snapshot name → why its last background build failed, and the command that builds it.

    A snapshot that was built after the failure, for example by `edgeinfer warm`, is left out.
    """
    by_name: dict[str, tuple[str, str]] = {}
    built_ns = {name: int(storage.generation_of(f[0]), 16) for name, f in storage.generations().items()}
    for line in _read_log().splitlines():
        stamp, _, text = line.partition(" ")
        name, _, outcome = text.partition(_NOT_BUILT)
        reason, _, command = outcome.partition(_AGAIN)
        by_name.pop(text.partition(": built in ")[0], None)
        by_name.pop(name, None)  # the last failure becomes the last entry
        is_failure = reason not in ("", ALREADY_BUILT, BEING_BUILT, SWITCHED_OFF)
        if is_failure and stamp > time.strftime(_STAMP, time.localtime(built_ns.get(name, 0) / 1e9)):
            by_name[name] = reason, command
    return by_name


def _read_log() -> str:
    try:
        with open(log_file(), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def log(text: str) -> None:
    """Add a line to the log; a log over 256 KiB is first renamed to auto-warm.old.log.

    Raises OSError, and SnapshotUnsafeError if other users can access the log's folder.
    """
    path = log_file()
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    paths.refuse_unsafe(folder, directory=True)
    if os.path.exists(path) and os.path.getsize(path) > _LOG_BYTES:
        os.replace(path, path.removesuffix(".log") + ".old.log")
    stamp = time.strftime(_STAMP)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{stamp} {text}\n")


def log_file() -> str:
    """Return the path of the log of background builds."""
    return os.path.join(paths.base("state"), LOG)
