"""The app: a resumed process with its model, or a cold one that loads it.

Both receive a launch request on the link to their launcher and adopt its environment (`reinitialize`).
By its role they then run a verb, serve an engine to another process, compute the canary, or collect
facts for a verification. The supervisor reports their end to the launcher.

`python -m edgeinfer.snapshots.restore.app_process FD` is a cold app; it has no model yet.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec

from edgeinfer.host import Start
from edgeinfer.launcher import messages
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.platform import linux, process, tcp
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots.restore import reinitialize
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.snapshots.restore.loaded_model import LoadedModel

TRACE_IMPORTS = "EDGEINFER_TRACE_IMPORTS"


def run_app(
    link: socket.socket,
    received: tuple[messages.LauncherMessage, list[int]] | None,
    loaded: LoadedModel | None,
    resumed_ns: int,
) -> NoReturn:
    """Run a launch request; exit if the launcher is gone. Never returns."""
    if received is None:
        os._exit(125)
    request, fds = received
    assert isinstance(request, LaunchRequest)
    code = 70
    try:
        # a set of all module names costs 900 page faults: only for a test that traces imports
        known = set(sys.modules) if any(TRACE_IMPORTS in entry for entry in request.env) else set()
        listeners = _take_over(request, fds, loaded)
        start = _start(request, resumed_ns)
        code = _run_role(link, request, loaded, start, listeners)
        _trace_imports(known)
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


def _take_over(
    request: LaunchRequest, fds: list[int], loaded: LoadedModel | None
) -> list[socket.socket]:
    """Adopt entropy first, then descriptors, then the rest; return the sockets of the request."""
    samplers = reinitialize.reseed(request.entropy, loaded.droppable if loaded else [])
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    reinitialize.adopt(request)
    reinitialize.new_streams()
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
        tcp.ask_through(sockets.pop())
    return sockets


def _title(request: LaunchRequest, loaded: LoadedModel | None) -> str:
    """Return the title that `ps` shows for the resumed process: `edgeinfer serve qwen3-4b`."""
    what = request.argv[0] if request.role == "verb" else request.role
    return " ".join(("edgeinfer", what, *([loaded.model] if loaded else [])))


def _stop(_number: int, _frame: object) -> None:
    """Stop on Ctrl-Z: SIGTSTP's default action does nothing in a session without a terminal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _start(request: LaunchRequest, resumed_ns: int) -> Start:
    """Return how this launch started, with its stages (ms) from the launcher's exec."""
    stages = {
        "launcher": request.main_ns,
        "restore": request.spawn_ns,
        "running": resumed_ns,
        "request": time.monotonic_ns(),
    }
    return Start(
        how="resumed" if request.how == "resumed" else "cold",
        reason=request.reason,
        snapshot=request.snapshot,
        stages_ms={name: round((at - request.exec_ns) / 1e6, 1) for name, at in stages.items()},
    )


def _run_role(
    link: socket.socket,
    request: LaunchRequest,
    loaded: LoadedModel | None,
    start: Start,
    sockets: list[socket.socket],
) -> int:
    if request.role == "verb":
        from edgeinfer.cli.main import main  # 20 ms in a cold process

        host = AppHost(start, link, loaded, tuple(sockets), request=request)
        return main(list(request.argv), host)
    if request.role == "worker":
        from edgeinfer.workers.remote_engine import serve_engine  # 5 ms in a cold process

        host = AppHost(start, link, loaded, request=request)
        options = msgspec.json.decode(request.options, type=LoadOptions)
        serve_engine(sockets[0], start, lambda progress: host.engine(request.model, options, progress))
        return 0
    if request.role == "canary" and loaded is not None:
        process.stay_back()
        messages.send(link, messages.Payload(content=loaded.canary()))
        return 0
    if request.role == "facts":
        from edgeinfer.snapshots.restore import checks  # 1 ms; a test's or a verification's process

        found = msgspec.json.encode(checks.gather(loaded))
        messages.send(link, messages.Payload(content=found))
        return 0
    raise ValueError(f"a launch request with the role {request.role!r}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _trace_imports(before: set[str]) -> None:
    """Trace imports after the resume, for the test of the parked process's module list."""
    path = os.environ.get(TRACE_IMPORTS)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(sorted(set(sys.modules) - before)))


def main() -> NoReturn:
    """Run a cold app: the link's descriptor is the only argument."""
    resumed_ns = time.monotonic_ns()
    process.die_with_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    run_app(link, messages.receive(link), None, resumed_ns)


if __name__ == "__main__":
    from edgeinfer.snapshots.restore import app_process  # its classes, not those of `__main__`

    app_process.main()
