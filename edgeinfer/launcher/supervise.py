"""The supervisor: the app's parent process, and init of the app's pid namespace.

The launcher forks the supervisor without a new interpreter, which takes half a millisecond. The
supervisor forwards signals to the app, reports the app's end, and dies with the launcher. The kernel
then ends the whole pid namespace, so even `kill -9` of the launcher ends the app. Reports are lines on
a pipe: "restored", "failed WHY", "stopped", "exit N", "signal N".

Standard library only, and nothing that starts threads: a child of `linux.clone` could hang.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import _socket
import os
import sys

from edgeinfer.platform import linux, process
from edgeinfer.snapshot_format import criu
from edgeinfer.snapshot_format.storage import IMAGES, Manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    Tell = Callable[[str], None]

#: Signals that the launcher forwards to the app.
FORWARDED = (
    *(_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGWINCH),
    *(_signal.SIGTSTP, _signal.SIGCONT, _signal.SIGUSR1, _signal.SIGUSR2),
)
_LOG_BYTES = 4000


class Supervisor:
    """A running supervisor, the parent process of an app.

    `status_fd` is the pipe with the supervisor's reports, `link` the launcher's socket to the app.
    """

    def __init__(self, pid: int, status_fd: int, link: _socket.socket) -> None:
        self.pid, self.status_fd = pid, status_fd
        self.link = link


def resume(manifest: Manifest, folder: str, limit_s: int = criu.RESTORE_LIMIT_S) -> Supervisor:
    """Start a supervisor that restores an app from the snapshot in `folder`. Raises OSError.

    This call does not wait: later, the supervisor reports "restored", or "failed WHY" if the restore
    failed or did not end within `limit_s` seconds.
    """
    flags = criu.NAMESPACES[manifest.tier]
    user, group = os.getuid(), os.getgid()
    link, app_link = _socket.socketpair()
    link_fd = app_link.fileno()
    status_read, status_write = os.pipe()
    wake_read, wake_write = os.pipe()
    os.write(wake_write, b"!")  # the parked process (snapshots/parked.py: _sleep) waits for this byte

    def work(tell: Tell) -> NoReturn:
        linux.become_init(flags, user, group)
        log = os.memfd_create("criu")
        criu_pid = os.fork()
        if criu_pid == 0:
            try:
                os.dup2(log, 2)
                criu.exec_restore(manifest, f"{folder}/{IMAGES}", link_fd, wake_read, limit_s)
            finally:
                os._exit(127)
        os.close(link_fd)
        os.close(wake_read)
        _supervise(tell, criu_pid, manifest.pid, log, limit_s)

    pid = linux.clone(flags) if flags else os.fork()
    if pid == 0:
        _main(work, status_write, keep=(status_write, link_fd, wake_read))
    app_link.close()
    for fd in (status_write, wake_read, wake_write):
        os.close(fd)
    return Supervisor(pid, status_read, link)


def start() -> Supervisor:
    """Start a supervisor that runs a cold app. Raises OSError."""
    link, app_link = _socket.socketpair()
    link_fd = app_link.fileno()
    command = process.child_command("edgeinfer.snapshots.restore.app_process", str(link_fd))
    status_read, status_write = os.pipe()

    def prepare() -> None:
        process.die_with_parent()
        os.setsid()

    def work(tell: Tell) -> NoReturn:
        os.set_inheritable(link_fd, True)
        child = process.fork_and_exec(command, prepare)
        os.close(link_fd)
        _supervise(tell, 0, child, -1)

    pid = os.fork()
    if pid == 0:
        _main(work, status_write, keep=(status_write, link_fd))
    app_link.close()
    os.close(status_write)
    return Supervisor(pid, status_read, link)


def _main(work: Callable[[Tell], NoReturn], status_fd: int, keep: tuple[int, ...]) -> NoReturn:
    def tell(line: str) -> None:
        os.write(status_fd, line.encode(errors="replace") + b"\n")

    try:
        process.die_with_parent()
        os.setsid()
        _signal.set_wakeup_fd(-1)
        process.redirect_to_null()
        process.close_all_but(*keep)
        work(tell)
    except BaseException as error:  # noqa: BLE001  the main of a process
        tell(f"failed {type(error).__name__}: {error}".replace("\n", " "))
    os._exit(125)


def _supervise(tell: Tell, criu_pid: int, app_pid: int, log: int, limit_s: int = 0) -> NoReturn:
    """Report on CRIU (`criu_pid` 0: none) and the app until the restore fails or the app ends."""
    alive = criu_pid == 0
    early: list[int] = []
    exit_status: int | None = None

    def forward(number: int, _frame: object) -> None:
        if alive:
            process.quietly(os.kill, app_pid, number)
        else:
            early.append(number)

    for number in FORWARDED:
        _signal.signal(number, forward)
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if pid == criu_pid:
            if status:
                lines = os.pread(log, _LOG_BYTES, 0).decode(errors="replace").strip().split("\n")
                code = os.waitstatus_to_exitcode(status)
                hung = f"did not end within {limit_s} s"
                outcome = hung if code == -_signal.SIGALRM else f"ended with {code}"
                tell(f"failed criu {outcome}: {'; '.join(lines)}")
                os._exit(125)
            alive = True
            tell("restored")
            while early:
                forward(early.pop(0), None)
            if exit_status is not None:
                _report(tell, exit_status)
        elif pid == app_pid:
            if alive or os.WIFSTOPPED(status):
                _report(tell, status)
            else:
                exit_status = status


def _report(tell: Tell, status: int) -> None:
    if os.WIFSTOPPED(status):
        tell("stopped")
    elif os.WIFSIGNALED(status):
        tell(f"signal {os.WTERMSIG(status)}")
        os._exit(128 + os.WTERMSIG(status))
    else:
        tell(f"exit {os.WEXITSTATUS(status)}")
        os._exit(os.WEXITSTATUS(status))


def _try_namespaces(tier: str) -> None:
    """Exit with 0 if the kernel allows the namespaces that CRIU needs with the privileges `tier`.

    Otherwise write the reason to stderr. `criu.namespaces_refused` runs this module as `probe TIER`.
    """
    user, group = os.getuid(), os.getgid()
    flags = criu.NAMESPACES[tier]
    pid = linux.clone(flags)
    if pid == 0:
        try:
            linux.become_init(flags, user, group)
            if tier == criu.UNPRIVILEGED:
                linux.keep_capabilities(linux.CRIU_CAPABILITIES)
            os._exit(0)
        except OSError as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)


if __name__ == "__main__":
    try:
        _try_namespaces(sys.argv[2])
    except OSError as error:
        sys.exit(str(error))
