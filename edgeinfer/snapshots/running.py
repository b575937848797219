"""List running launches and background builds, and the models they have loaded, from /proc.

There are no pid files: a resumed app always has the same pid in its namespace, and a file would outlive
a `kill -9`. A launcher or build is recognized by its command line, an app by its name and parents.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from edgeinfer.launcher import builds
from edgeinfer.launcher.argv import LAUNCH_VERBS, with_verb
from edgeinfer.platform import paths, process, process_metadata
from edgeinfer.platform.process_metadata import read_process_record
from edgeinfer.runtime.events import CacheReport
from edgeinfer.runtime.options import LayersInfo, ReplicasInfo
from edgeinfer.snapshots.inputs import ProcessDescription

T = TypeVar("T")


class RunningLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A running launch, or a background build: its command, and the memory of all its processes.

    `pid` is the launcher's or the build's; a build's `verb` is "warm". `apps` is the number of apps
    (processes with an engine). `private_bytes` is anonymous memory, `shared_bytes` file-backed memory,
    which processes share. `last_prompts`, `replicas`, `layers` (on GPUs) and `snapshots` (names) have
    an entry for each app that has such a value.
    """

    pid: int
    verb: str
    arguments: tuple[str, ...]
    age_s: float
    apps: int
    private_bytes: int
    shared_bytes: int
    last_prompts: tuple[CacheReport, ...] = ()
    replicas: tuple[ReplicasInfo, ...] = ()
    layers: tuple[LayersInfo, ...] = ()
    snapshots: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Command line without the word `edgeinfer`."""
        return " ".join((self.verb, *self.arguments))


def processes(*, everywhere: bool = False) -> list[RunningLaunch]:
    """List this user's launches and builds, oldest first.

    Processes that share no folder (config, data, cache, state) with this process are included only with
    `everywhere`.
    """
    parents, mine = _parents(), os.getpid()
    launches = []
    for pid in parents:
        typed = _typed_command(pid)
        if typed is None or pid == mine or _typed_command(parents.get(pid, 0)) == typed:
            continue
        if not (everywhere or shares_folders(pid)):
            continue
        below = _descendants(pid, parents)
        sizes = [_memory(child) for child in (pid, *below)]
        apps = _apps(below)
        launches.append(
            RunningLaunch(
                pid=pid,
                verb=typed[0],
                arguments=tuple(typed[1:]),
                age_s=_age_s(pid),
                apps=len(apps),
                private_bytes=sum(private for private, _ in sizes),
                shared_bytes=max((shared for _, shared in sizes), default=0),
                last_prompts=_records(apps, process_metadata.CACHE_REPORT, CacheReport),
                replicas=_records(apps, process_metadata.REPLICAS, ReplicasInfo),
                layers=_records(apps, process_metadata.LAYERS, LayersInfo),
                snapshots=tuple(filter(None, (loaded.snapshot for loaded in _loaded_by(apps)))),
            )
        )
    return sorted(launches, key=lambda running: -running.age_s)


def _records(apps: list[int], name: str, kind: type[T]) -> tuple[T, ...]:
    records = (read_process_record(pid, name, kind) for pid in apps)
    return tuple(record for record in records if record is not None)


def _apps(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _read(pid, "comm") == b"edgeinfer\n"]


def _loaded_by(apps: list[int]) -> tuple[ProcessDescription, ...]:
    return _records(apps, process_metadata.DESCRIPTION, ProcessDescription)


def loaded_below(pid: int) -> tuple[ProcessDescription, ...]:
    """List the descriptions of the models that apps among the descendants of `pid` have loaded."""
    return _loaded_by(_apps(_descendants(pid, _parents())))


def has_loaded(pid: int, model: str) -> bool:
    """Return whether an app among the descendants of `pid` has loaded this model."""
    return any(loaded.is_of(model) for loaded in loaded_below(pid))


def shares_folders(pid: int) -> bool:
    """Return whether process `pid` shares a folder (config, data, cache, state) with this process.

    True if /proc does not tell.
    """
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0"))
    return paths.shared_with({name: value for name, _, value in pairs})


def _parents() -> dict[int, int]:
    """Map the pid of each of this user's processes to its parent's pid; {} without /proc."""
    parents: dict[int, int] = {}
    if not os.path.isdir("/proc/self"):
        return parents
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            parents[int(entry.name)] = int(_stat(int(entry.name))[1])
        except (OSError, IndexError):
            continue  # the process has just ended
    return parents


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name: state, parent's pid, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _typed_command(pid: int) -> list[str] | None:
    """Return the verb and arguments of a launcher or background build; None for other processes."""
    argv = _read(pid, "cmdline").decode(errors="replace").split("\0")[:-1]
    if argv[-4:-2] in (["-m", builds.JOBS], [process.MODULE_SWITCH, builds.JOBS]):
        return ["warm", argv[-2]]
    for index, word in enumerate(argv[:2]):
        if os.path.basename(word) == "edgeinfer":
            command = with_verb(argv[index + 1 :])
            return command if command[0] in LAUNCH_VERBS else None
        if not os.path.basename(word).startswith("python"):
            break
    return None


def _descendants(pid: int, parents: dict[int, int]) -> list[int]:
    below: list[int] = []
    wave = [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        below += wave
    return below


def _read(pid: int, name: str) -> bytes:
    """Return the content of /proc/PID/NAME; b"" if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _age_s(pid: int) -> float:
    try:
        started = int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _memory(pid: int) -> tuple[int, int]:
    sizes = {"RssAnon:": 0, "RssFile:": 0}
    for line in _read(pid, "status").decode(errors="replace").splitlines():
        name, _, size = line.partition("\t")
        if name in sizes:
            sizes[name] = int(size.split()[0]) * 1024
    return sizes["RssAnon:"], sizes["RssFile:"]
