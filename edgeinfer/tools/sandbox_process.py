"""Run one command in a sandbox: `python -m` this module, with a `Job` as JSON on stdin.

There are three processes. The first one waits; after SIGTERM or its parent's end it kills the others.
Its child is init (PID 1) of new namespaces: init enforces limits that rlimits cannot, and all processes
in the namespaces die with init. The third is the command, which init starts under Landlock and seccomp,
in a root that contains only programs and the user's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from typing import NamedTuple

from edgeinfer.platform import confinement, linux
from edgeinfer.platform.confinement import refuse_hidden_memory
from edgeinfer.platform.process import die_with_parent
from edgeinfer.tools.self_running import NEW_FILES, SelfRunning

#: Maximum memory of all processes together, and maximum disk space that one call may take (bytes).
MEMORY_BYTES, DISK_BYTES = 2 << 30, 2 << 30
_PROCESSES, _FILES = 256, 256
#: Maximum number of sockets of all processes; each may take two buffers of 208 KiB (kernel's default).
SOCKETS = 2048
_FILE_BYTES = 512 << 20
_ROOT_OPTIONS = "size=256m,nr_inodes=16k,mode=755"
_WATCH_S = 0.05
_READABLE = """
    /usr /bin /sbin /lib /lib32 /lib64 /etc/alternatives /etc/group /etc/ld.so.cache /etc/localtime
    /etc/nsswitch.conf /etc/passwd /etc/ssl/certs /etc/ssl/openssl.cnf /sys/devices/system/cpu
""".split()
_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
_NEW_ROOT = "/sys"  # a mount point that cannot contain the user's folder
_AT_LIMIT = 124


class Job(NamedTuple):
    """A command to run in `folder`. It can read the paths `readable`; the file /command has `code`."""

    command: list[str]
    code: str
    folder: str
    readable: list[str]
    timeout_s: float


def main() -> int:
    """Run the job that stdin describes (JSON), and return its exit status.

    124 means that the job reached a limit, e.g. of time; 125, that no sandbox can be made.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    job = Job(**json.load(sys.stdin.buffer))
    files = SelfRunning(job.folder)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    user, group = os.getuid(), os.getgid()
    try:
        init = linux.clone(linux.SANDBOX_NAMESPACES)
    except OSError as error:
        return _report_refusal(f"user namespaces: {os.strerror(error.errno or 0)}")
    if init:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        status = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 255
        # the parent process calls `restore`. If the parent was killed, this process must do so
        if os.getppid() != parent:
            files.restore()
        return status
    status = 125
    try:
        die_with_parent()
        status = _run(job, files.paths(), user, group)
    except OSError as error:
        _report_refusal(error.strerror or str(error))
    finally:
        os._exit(status)


def _report_refusal(reason: str) -> int:
    print(f"no sandbox: {reason}", flush=True)  # noqa: T201  the parent process reads this line
    return 125


def _run(job: Job, read_only: set[str], user: int, group: int) -> int:
    try:
        linux.map_this_user(user, group)
    except PermissionError as error:
        needed = "as root they need the capability CAP_SETFCAP" if user == 0 else error.strerror
        raise OSError(f"user namespaces: {needed}") from error
    _write("/proc/sys/user/max_user_namespaces", "0")
    _write("/proc/self/oom_score_adj", "1000")
    linux.mount_proc()
    with contextlib.suppress(OSError):  # for root, which RLIMIT_NPROC does not limit; needs Linux 6.14
        _write("/proc/sys/kernel/pid_max", str(300 + _PROCESSES))
    before = _free(job.folder)
    _change_root(job, read_only)
    # record the self-running files (e.g. `.envrc`) before the command can change them
    files = SelfRunning(job.folder, looks_below=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    child = os.fork()
    if child == 0:
        try:
            _confine(job)
            os.execve(job.command[0], job.command, os.environ)
        except OSError as error:
            _report_refusal(error.strerror or str(error))
        finally:
            os._exit(125)
    return _watch(job, child, before, files)


def _change_root(job: Job, read_only: set[str]) -> None:
    """Move to a new root: programs and the folder, without the sockets of other programs."""
    linux.mount("tmpfs", _NEW_ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _ROOT_OPTIONS)
    for path in [*_READABLE, *_DEVICES, *job.readable, "/proc", job.folder]:
        target = _NEW_ROOT + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with contextlib.suppress(FileExistsError):  # the link is in a folder that is bound already
                os.symlink(os.readlink(path), target)
        elif os.path.exists(path):
            os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
            if not os.path.isdir(path):
                os.close(os.open(target, os.O_CREAT))
            linux.bind(path, target, read_only=path != job.folder)
    for path in sorted(read_only):
        linux.bind(path, _NEW_ROOT + path, read_only=True)
    with open(f"{_NEW_ROOT}/command", "w", encoding="utf-8") as file:
        file.write(job.code)
    os.makedirs(f"{_NEW_ROOT}/tmp", exist_ok=True)  # noqa: S108
    os.symlink("/tmp", f"{_NEW_ROOT}/dev/shm")  # noqa: S108
    os.symlink("/proc/self/fd", f"{_NEW_ROOT}/dev/fd")
    linux.pivot_root(_NEW_ROOT)


def _confine(job: Job) -> None:
    os.chdir(job.folder)
    for limited, most in (
        (resource.RLIMIT_CPU, int(job.timeout_s) + 1),
        (resource.RLIMIT_AS, 4 * MEMORY_BYTES),
        (resource.RLIMIT_NPROC, _PROCESSES),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limited)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limited, (most, most))
    linux.drop_privileges()
    confinement.confine([job.folder, "/tmp", *_DEVICES[:3]])  # noqa: S108
    refuse_hidden_memory()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGTERM])


def _watch(job: Job, child: int, free: _Free, files: SelfRunning) -> int:
    """Wait for the command; return its status, or 124 after printing the limit that it exceeded."""
    end_s = time.monotonic() + job.timeout_s
    status, reason = None, ""
    while status is None and not reason and not files.changed_names():
        signal.sigtimedwait([signal.SIGCHLD], _WATCH_S)
        while status is None and (waited := os.waitpid(-1, os.WNOHANG))[0]:
            if waited[0] == child:
                status = os.waitstatus_to_exitcode(waited[1]) & 255
        reason = _passed_limit(free, _free(job.folder))
        if time.monotonic() > end_s:
            reason = f"the command took more than {job.timeout_s:g} s"
    _end_all()
    if reason:
        print(f"\nended: {reason}", flush=True)  # noqa: T201
        return _AT_LIMIT
    return _AT_LIMIT if status is None or files.changed_names() else status


def _passed_limit(before: _Free, now: _Free) -> str:
    if _memory() > MEMORY_BYTES:
        return f"the processes took more than {MEMORY_BYTES >> 30} GiB of memory"
    if now.shared_bytes > before.shared_bytes + MEMORY_BYTES:
        return f"shared memory grew by more than {MEMORY_BYTES >> 30} GiB"
    if now.sockets > before.sockets + SOCKETS:
        return f"the processes had more than {SOCKETS:,} sockets, whose buffers take memory"
    if now.bytes < before.bytes - DISK_BYTES:
        return f"free disk space fell by more than {DISK_BYTES >> 30} GiB"
    if now.files < before.files - NEW_FILES:
        return f"more than {NEW_FILES:,} files were created on the disk"
    return ""


def _end_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _memory() -> int:
    """Return the memory of all processes (bytes), with page tables, without file-backed pages."""
    kib = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            kib += sum(map(int, re.findall(r"(?:RssAnon|RssShmem|VmPTE):\s*(\d+)", file.read())))
    return kib << 10


class _Free(NamedTuple):
    """Free bytes and inodes of the disk, shared memory of the machine, sockets of this sandbox."""

    bytes: int
    files: int
    shared_bytes: int
    sockets: int


def _free(folder: str) -> _Free:
    disk = os.statvfs(folder)
    with open("/proc/meminfo") as file:
        shared = re.search(r"Shmem:\s*(\d+)", file.read())
    with open("/proc/net/sockstat") as file:  # sockets of this network namespace, closed ones included
        sockets = re.search(r"sockets: used (\d+)", file.read())
    shared_bytes = int(shared[1]) << 10 if shared else 0
    n_sockets = int(sockets[1]) if sockets else 0
    return _Free(disk.f_bavail * disk.f_frsize, disk.f_favail, shared_bytes, n_sockets)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
