"""Start other processes of this program, and set priorities."""

from __future__ import annotations

import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import subprocess
    import threading
    from collections.abc import Callable, Mapping
    from typing import Any, BinaryIO

#: In the one-file program, `edgeinfer --edgeinfer-module MODULE ARG...` runs MODULE as `__main__`.
MODULE_SWITCH = "--edgeinfer-module"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
#: Interval (s) at which `ask_child` checks whether the child has ended.
_CHILD_POLL_S = 0.01
#: Niceness of a background process, and of its session (autogroup), which then gets a tenth of a busy
#: CPU.
_LOWEST, _SESSION = 19, 10
#: Number of tries to set a session's niceness, and pause (s): the kernel allows ten tries per second.
_AUTOGROUP_TRIES, _AUTOGROUP_WAIT_S = 5, 0.12


def child_command(module: str, *args: str) -> list[str]:
    """Return the command that runs edgeinfer's `module`, by Python or by the one-file program."""
    if getattr(sys, "frozen", False):
        return [sys.executable, MODULE_SWITCH, module, *args]
    return [sys.executable, "-P", "-m", module, *args]  # -P: import nothing from the current folder


def ask_child(
    module: str,
    *args: str,
    content: bytes = b"",
    patience_s: float = 30.0,
    stop: threading.Event | None = None,
) -> tuple[bytes, str]:
    """Run edgeinfer's `module` in a child that may crash, with `content` as its stdin.

    Returns the child's stdout, and how the child ended: "ended with status 3: LAST LINE OF STDERR". The
    child is killed after `patience_s`, or when `stop` is set. Raises OSError if it cannot be started.
    """
    import contextlib
    import subprocess
    import threading

    stop = stop or threading.Event()
    # use files, not pipes: a process that a device driver starts may keep a pipe open for ever
    with _memory_file(content) as stdin, _memory_file() as out, _memory_file() as err:
        child = start_child(child_command(module, *args), stdin=stdin, stdout=out, stderr=err)
        end_s = time.monotonic() + patience_s
        try:
            while child.poll() is None and time.monotonic() < end_s and not stop.wait(_CHILD_POLL_S):
                pass
            code = child.poll()
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)  # a driver's call may never return: leave the child
        if code is None:
            return b"", "was stopped" if stop.is_set() else f"took more than {patience_s:.0f} s"
        # pread, because the file offset is shared with processes that may go on writing
        output, errors = (os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in (out, err))
    last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
    ending = f"ended with {describe_exit(code)}"
    return output, f"{ending}: {last}" if last else ending


def _memory_file(content: bytes = b"") -> BinaryIO:
    file = open(os.memfd_create("edgeinfer"), "w+b", buffering=0)  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


def describe_exit(code: int) -> str:
    """Describe a return code of `subprocess`: "SIGSEGV", "signal 40" or "status 3"."""
    import signal

    # real-time signals have no names
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    return name if code < 0 else f"status {code}"


def fork_and_exec(command: list[str], prepare: Callable[[], None]) -> int:
    """Fork; the child calls `prepare`, then executes `command`. Return the child's pid.

    If the child fails before or in the exec, its exit status is 127.
    """
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os.execv(command[0], command)
        finally:
            os._exit(127)
    return pid


def open_missing_streams() -> None:
    """Open closed standard streams on /dev/null, to reserve descriptors 0 to 2. Raises OSError."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open("/dev/null", os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def redirect_to_null(*keep: int) -> None:
    """Redirect the standard streams to /dev/null, except those in `keep`. Raises OSError."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if fd not in keep:
            os.dup2(null, fd)
    if null > 2:
        os.close(null)


def quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call a function and ignore OSError and KeyError; importing contextlib would take 3 ms."""
    try:  # noqa: SIM105
        call(*arguments)
    except (OSError, KeyError):
        pass


def close_all_but(*keep: int) -> None:
    """Close all descriptors from 3 on, except those in `keep`."""
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX") if first > 4096 else 4096)


def die_with_parent(number: int = _SIGKILL) -> None:
    """Let the kernel send this process signal `number` when its parent thread ends. Raises OSError."""
    if sys.platform != "linux":
        return
    import ctypes  # slow import (1.7 ms); an app's supervisor has imported it already

    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        failed = ctypes.get_errno()
        raise OSError(failed, f"prctl(PR_SET_PDEATHSIG): {os.strerror(failed)}")
    if os.getppid() != parent:  # the parent had ended before the call
        os.kill(os.getpid(), number)


def die_with_parent_hook(number: int = _SIGKILL) -> Callable[[], None] | None:
    """Return a `preexec_fn` for a child that is to get signal `number` when this thread ends.

    None on other systems than Linux.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    # look `prctl` up before the fork, because few calls are safe after it
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent had ended before the call
            os._exit(127)

    return prepare


class SignalHandlers:
    """Installs signal handlers during a `with` block; does nothing outside the main thread."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._handlers = handlers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                self._before[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)


def start_child(command: list[str], number: int = _SIGKILL, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a child, to which the kernel sends signal `number` when this thread ends.

    `settings` are arguments of `subprocess.Popen`; its errors are raised. A signal that arrives during
    the fork is handled after the start, because Python would drop an exception of its handler.
    """
    import signal
    import subprocess

    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))]
    arrived: list[int] = []
    try:
        with SignalHandlers(dict.fromkeys(handled, lambda n, _: arrived.append(n))):
            return subprocess.Popen(command, preexec_fn=die_with_parent_hook(number), **settings)
    finally:
        for arrived_number in arrived:
            signal.raise_signal(arrived_number)


def use_lowest_priority() -> None:
    """Give this process the lowest CPU priority, and its session, too, if the process is the leader.

    With autogroups (sched(7)), Linux shares the CPU among sessions first, and niceness counts only
    within a session. The session of another leader, such as a user's shell, is not changed.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(_SESSION))
            return
        except BlockingIOError:
            time.sleep(_AUTOGROUP_WAIT_S)
        except OSError:
            return


def keep_lowest_priority() -> None:
    """If this process has the lowest priority, give it to the session that the process leads, too."""
    if os.getpriority(os.PRIO_PROCESS, 0) == _LOWEST:
        use_lowest_priority()


def lower_thread_priority() -> None:
    """Lower this thread's priority on Linux; elsewhere do nothing: only processes have priorities."""
    if sys.platform == "linux":
        thread = _thread.get_native_id()
        nice = max(os.getpriority(os.PRIO_PROCESS, thread), _SESSION)
        quietly(os.setpriority, os.PRIO_PROCESS, thread, nice)
