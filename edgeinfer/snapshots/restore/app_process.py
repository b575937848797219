"""The app process: what a parked process becomes when it is resumed, and what a cold start runs.

Both take a launch request from the link to their launcher (`frames`), become whoever launched them
(`freshness`), and then run a verb, serve an engine to another process, or answer the canary. The
launcher learns how they ended from the supervisor.

`python -m edgeinfer.snapshots.restore.app_process FD` is the cold one; it has nothing loaded yet.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from edgeinfer.host import Start
from edgeinfer.launcher import messages
from edgeinfer.platform import process, tcp
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots import linux
from edgeinfer.snapshots.restore import reinitialize
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.snapshots.restore.loaded_model import LoadedModel

#: Roles of a launch request.
VERB = b"verb"
WORKER = b"worker"
CANARY = b"canary"
FACTS = b"facts"
TRACE_IMPORTS = "EDGEINFER_TRACE_IMPORTS"


def run_app(
    link: socket.socket,
    request: tuple[dict[str, bytes], list[int]] | None,
    loaded: LoadedModel | None,
    resumed_ns: int,
) -> NoReturn:
    """Run a launch request, None where the launcher is gone. Never returns."""
    if request is None:
        os._exit(125)
    fields, fds = request
    code = 70
    try:
        # looking at every name costs 900 page faults: only where a test asks
        known = set(sys.modules) if TRACE_IMPORTS.encode() in fields["env"] else set()
        listeners = _take_over(fields, fds, loaded)
        start = _start(fields, resumed_ns)
        code = _play(link, fields, loaded, start, listeners)
        _trace_imports(known)
        atexit._run_exitfuncs()
        _flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _flush()
    except BaseException:  # noqa: BLE001  the main of a process
        sys.excepthook(*sys.exc_info())
        _flush()
    try:  # noqa: SIM105
        messages.send(link, {"op": "exit", "code": code})
    except OSError:
        pass
    os._exit(code)


def _take_over(
    fields: Mapping[str, bytes], fds: list[int], loaded: LoadedModel | None
) -> list[socket.socket]:
    """Entropy first, then descriptors, then everything else. Returns the sockets that came along."""
    samplers = reinitialize.reseed(fields["entropy"], loaded.droppable if loaded else [])
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    reinitialize.adopt(fields)
    reinitialize.new_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, _stop)
    linux.set_name("edgeinfer")
    linux.set_title(_title(fields, loaded))
    process.die_with_parent()
    if loaded is not None:
        loaded.resume(samplers)
    sockets = [socket.socket(fileno=fd) for fd in fds[3:]]
    if sockets and sockets[-1].family == socket.AF_NETLINK:
        tcp.ask_through(sockets.pop())
    return sockets


def _title(fields: Mapping[str, bytes], loaded: LoadedModel | None) -> str:
    """What `ps` shows instead of the command that was parked: `edgeinfer serve qwen3-4b`."""
    what = messages.split(fields["argv"])[0] if fields["role"] == VERB else fields["role"].decode()
    return " ".join(("edgeinfer", what, *([loaded.model] if loaded else [])))


def _stop(_number: int, _frame: object) -> None:
    """Ctrl-Z: the default action does nothing in a session without a terminal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _start(fields: Mapping[str, bytes], resumed_ns: int) -> Start:
    """How this launch went, in milliseconds from exec of the launcher."""
    began = int(fields["exec_ns"])
    stages = {
        "launcher": int(fields["main_ns"]),
        "restore": int(fields["spawn_ns"]),
        "running": resumed_ns,
    }
    ms = {name: round((at - began) / 1e6, 1) for name, at in stages.items()}
    ms["request"] = round((time.monotonic_ns() - began) / 1e6, 1)
    return Start(
        how="resumed" if fields["how"] == b"resumed" else "cold",
        reason=fields["reason"].decode(),
        snapshot=fields["snapshot"].decode(),
        stages_ms=ms,
    )


def _play(
    link: socket.socket,
    fields: Mapping[str, bytes],
    loaded: LoadedModel | None,
    start: Start,
    sockets: list[socket.socket],
) -> int:
    role, exec_ns = fields["role"], int(fields["exec_ns"])
    if role == VERB:
        from edgeinfer.cli.main import main  # 20 ms in a cold process

        argv = messages.split(fields["argv"])
        long_lived = argv[0] in ("chat", "serve")
        predecessor = sockets.pop() if int(fields.get("channels", b"0")) else None
        return main(
            argv,
            AppHost(
                start,
                link,
                loaded,
                tuple(sockets),
                exec_ns=exec_ns,
                hint="" if argv[0] == "chat" else fields["hint"].decode(),
                guess=fields["guess"].decode(),
                named=fields.get("named") == b"1",
                succeeds=fields.get("succeeds") == b"1",
                predecessor=predecessor,
                long_lived=long_lived,
            ),
        )
    if role == WORKER:
        from edgeinfer.workers.server import serve  # 5 ms in a cold process

        host = AppHost(start, link, loaded, exec_ns=exec_ns, is_worker=True)
        options = msgspec.json.decode(fields["options"], type=LoadOptions)
        serve(
            sockets[0], start, lambda progress: host.engine(fields["model"].decode(), options, progress)
        )
        return 0
    if role == CANARY and loaded is not None:
        process.stay_back()
        messages.send(link, {"op": "canary", "value": loaded.canary()})
        return 0
    if role == FACTS:
        from edgeinfer.snapshots.restore import checks  # 1 ms; a test's or a verification's process

        messages.send(link, {"op": "facts", "value": msgspec.json.encode(checks.gather(loaded))})
        return 0
    raise ValueError(f"a launch request with the role {role!r}")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except (AttributeError, ValueError, OSError):
            pass


def _trace_imports(before: set[str]) -> None:
    """Trace imports after the resume, for the test of the parked process's module list."""
    path = os.environ.get(TRACE_IMPORTS)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(sorted(set(sys.modules) - before)))


def main() -> NoReturn:
    """A cold app: the link's descriptor is the only argument."""
    resumed_ns = time.monotonic_ns()
    process.die_with_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    run_app(link, messages.receive(link), None, resumed_ns)


if __name__ == "__main__":
    from edgeinfer.snapshots.restore import app_process  # its classes, not those of `__main__`

    app_process.main()
