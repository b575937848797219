"""The app: the process of a verb, resumed with a model, or cold.

The app receives a launch request on the link to its launcher and adopts the launcher's environment. The
request's `role` says whether the app runs a verb, serves an engine to another process, computes the
canary, or reports facts about itself.

All processes resumed from one snapshot start with the same memory, so every source of randomness gets a
new seed first. If that fails, the app ends: its answers would repeat another process's random choices.

`python -m edgeinfer.snapshots.restore.app_process FD` is a cold app.
"""

from __future__ import annotations

import atexit
import contextlib
import locale
import os
import random
import resource
import signal
import socket
import ssl
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from edgeinfer.host import ProcessStart
from edgeinfer.launcher import messages
from edgeinfer.launcher.messages import LIMITS, LaunchRequest
from edgeinfer.platform import linux, process, tcp
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.snapshots.restore.loaded_model import LoadedModel

#: Environment variable of tests: path of a file that gets the modules imported after a resume.
TRACE_IMPORTS = "EDGEINFER_TRACE_IMPORTS"


def run_app(
    link: socket.socket,
    received: tuple[messages.LauncherMessage, list[int]] | None,
    loaded: LoadedModel | None,
    resumed_ns: int,
) -> NoReturn:
    """Run a launch request, then exit with the exit code of its verb.

    `received` is the request with its descriptors, None if the launcher has ended. `loaded` is the
    resumed model, None in a cold app. `resumed_ns` is when this process began to run (monotonic).
    """
    if received is None:
        os._exit(125)
    request, fds = received
    assert isinstance(request, LaunchRequest)
    code = 70
    try:
        # list the modules only in tests: reading all their names would cause 900 page faults
        modules = set(sys.modules) if any(TRACE_IMPORTS in entry for entry in request.env) else set()
        listeners = _adopt_launch(request, fds, loaded)
        start = _describe_start(request, resumed_ns)
        code = _run_role(link, request, loaded, start, listeners)
        if path := os.environ.get(TRACE_IMPORTS):
            Path(path).write_text("\n".join(sorted(set(sys.modules) - modules)), "utf-8")
        atexit._run_exitfuncs()
        _flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _flush()
    except BaseException:  # noqa: BLE001  the main of a process
        sys.excepthook(*sys.exc_info())
        _flush()
    with contextlib.suppress(OSError):
        messages.send(link, messages.Exit(code=code))
    os._exit(code)


def _adopt_launch(
    request: LaunchRequest, fds: list[int], loaded: LoadedModel | None
) -> list[socket.socket]:
    """Adopt seeds, streams and environment of a launch, in this order; return the launch's sockets."""
    samplers = reseed(request.entropy, loaded.droppable if loaded else [])
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    adopt_environment(request)
    new_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, _stop)
    linux.set_name("edgeinfer")
    linux.set_title(_title(request, loaded))
    process.die_with_parent()
    if loaded is not None:
        loaded.resume(samplers)
    sockets = [socket.socket(fileno=fd) for fd in fds[3:]]
    if sockets and sockets[-1].family == socket.AF_NETLINK:
        tcp.use_netlink_socket(sockets.pop())
    return sockets


def _title(request: LaunchRequest, loaded: LoadedModel | None) -> str:
    """Return the process's title, as `ps` shows it: `edgeinfer serve qwen3-4b`."""
    role = request.argv[0] if request.role == "verb" else request.role
    return " ".join(("edgeinfer", role, *([loaded.model] if loaded else [])))


def _stop(_number: int, _frame: object) -> None:
    """Handle Ctrl-Z: the app has no controlling terminal, so SIGTSTP by default would not stop it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _describe_start(request: LaunchRequest, resumed_ns: int) -> ProcessStart:
    """Return how this app was started, with the times (ms) since the launcher's exec."""
    stages = {
        "launcher": request.main_ns,
        "restore": request.spawn_ns,
        "running": resumed_ns,
        "request": time.monotonic_ns(),
    }
    return ProcessStart(
        how="resumed" if request.how == "resumed" else "cold",
        reason=request.reason,
        snapshot=request.snapshot,
        stages_ms={name: round((ns - request.exec_ns) / 1e6, 1) for name, ns in stages.items()},
    )


def _run_role(
    link: socket.socket,
    request: LaunchRequest,
    loaded: LoadedModel | None,
    start: ProcessStart,
    sockets: list[socket.socket],
) -> int:
    if request.role == "verb":
        from edgeinfer.cli.main import main  # slow import in a cold process: 20 ms

        host = AppHost(start, link, loaded, tuple(sockets), request=request)
        return main(list(request.argv), host)
    if request.role == "worker":
        from edgeinfer.workers.remote_engine import serve_engine  # slow import in a cold process: 5 ms

        host = AppHost(start, link, loaded, request=request)
        options = msgspec.json.decode(request.options, type=LoadOptions)
        serve_engine(
            sockets[0], lambda progress: (host.engine(request.model, options, progress), host.start)
        )
        return 0
    if request.role == "canary" and loaded is not None:
        process.keep_lowest_priority()
        messages.send(link, messages.Payload(content=loaded.canary()))
        return 0
    if request.role == "facts":
        from edgeinfer.snapshots.restore import checks  # only tests and `snapshots verify` need it

        facts = msgspec.json.encode(checks.gather(loaded))
        messages.send(link, messages.Payload(content=facts))
        return 0
    raise ValueError(f"unknown role of a launch request: {request.role!r}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def droppable_ranges(smaps: str) -> list[Range]:
    """Return the memory ranges that `smaps`, the text of /proc/PID/smaps, marks `dp` (droppable).

    glibc >= 2.41 has the state of its `getrandom` there.
    """
    ranges: list[Range] = []
    current = Range(0, 0)
    for line in smaps.splitlines():
        head = line.split(None, 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = head.split("-")
            current = Range(int(low, 16), int(high, 16))
        elif head == "VmFlags:" and "dp" in line.split()[1:]:
            ranges.append(current)
    return ranges


def read_droppable_ranges() -> list[Range]:
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        return droppable_ranges(file.read())


def clear_random_state(ranges: list[Range]) -> None:
    """Clear the states of random generators in `ranges`, before a dump and after a restore.

    Otherwise CRIU 4.1 would copy the states to each resumed process.
    """
    for low, high in ranges:
        linux.forget_pages(low, high - low)


def reseed(entropy: bytes, ranges: list[Range]) -> bytes:
    """Reseed each source of randomness from the kernel and the launcher's `entropy`.

    The random states in `ranges` are cleared. Returns the random bytes that seed the samplers.
    """
    clear_random_state(ranges)
    seed = linux.getrandom(64) + entropy
    ssl.RAND_add(seed, 64.0)
    random.seed(linux.getrandom(32) + entropy)
    tempfile._name_sequence = None  # type: ignore[attr-defined]  # reseeded only if the pid changes: here it does not
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(list(linux.getrandom(64)))
    return linux.getrandom(32) + entropy


def adopt_environment(request: LaunchRequest) -> None:
    """Adopt a launch's variables, directory (if it exists), umask, time zone, locale, CPUs, limits."""
    os.environ.clear()
    for assignment in request.env:
        name, _, value = assignment.partition("=")
        if name:
            os.environ[name] = value
    time.tzset()
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "")
    with contextlib.suppress(OSError):  # the directory was removed: stay in /
        os.chdir(request.cwd)
    os.umask(request.umask)
    processors = set(map(int, request.affinity))
    for thread in os.listdir("/proc/self/task") if processors else ():  # the engine's threads included
        with contextlib.suppress(OSError):  # the thread ended, or the processor is offline
            os.sched_setaffinity(int(thread), processors)
    for name, value in request.limits.items():
        if name in LIMITS:
            _limit(getattr(resource, name), int(value))
    if os.environ.get("EDGEINFER_DEBUG") != "1":  # a core file would contain prompts
        _limit(resource.RLIMIT_CORE, 0)


def _limit(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        soft = hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (soft, hard))


def new_streams() -> None:
    """Open sys.stdin, stdout and stderr on descriptors 0 to 2, as a new interpreter would."""
    encoding = locale.getencoding()
    # use UTF-8 in the C locale, as a new interpreter would
    lenient = encoding.lower() in ("ascii", "ansi_x3.4-1968", "646")
    if lenient or sys.flags.utf8_mode:
        encoding = "utf-8"
    errors = "surrogateescape" if lenient else "strict"
    sys.stdin = sys.__stdin__ = _open(0, "r", encoding, errors)  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _open(1, "w", encoding, errors)  # type: ignore[misc, assignment]
    sys.stderr = sys.__stderr__ = _open(2, "w", encoding, "backslashreplace")  # type: ignore[misc, assignment]


def _open(fd: int, mode: str, encoding: str, errors: str) -> object:
    try:
        buffering = 1 if os.isatty(fd) or fd == 2 else -1
        return open(fd, mode, buffering, encoding=encoding, errors=errors, closefd=False)
    except OSError:  # the descriptor is closed; a new interpreter would also use None
        return None


def main() -> NoReturn:
    """Run a cold app; the only command-line argument is the descriptor of its link."""
    resumed_ns = time.monotonic_ns()
    link = socket.socket(fileno=int(sys.argv[1]))
    run_app(link, messages.receive(link), None, resumed_ns)


if __name__ == "__main__":
    # run the imported `main`: classes of `__main__` would differ from those that other modules import
    from edgeinfer.snapshots.restore import app_process

    app_process.main()
