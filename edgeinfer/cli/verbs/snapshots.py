"""`edgeinfer snapshots list|show|take|verify|rm|prune`; other actions are in `snapshots_transfer`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer.cli.options import add_quiet, add_yes
from edgeinfer.cli.parser import add_action, add_option
from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.terminal import StageProgress, confirm, stoppable, table
from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.errors import (
    RestoreError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMissingError,
    SnapshotStaleError,
    UsageError,
)
from edgeinfer.host import EngineHost
from edgeinfer.launcher.argv import LAUNCH_VERBS
from edgeinfer.platform import paths
from edgeinfer.snapshot_format import criu, fingerprint, storage
from edgeinfer.snapshots import registry, running
from edgeinfer.snapshots.builder import builder, jobs
from edgeinfer.snapshots.builder.jobs import take as build
from edgeinfer.snapshots.inputs import ProcessDescription
from edgeinfer.snapshots.registry import Details, Failure, ListedSnapshot
from edgeinfer.units import format_bytes, format_duration


class SnapshotsResult(Result, frozen=True, kw_only=True):
    """All snapshots, with their state on this machine. `building` names those that are being built.

    `disk_bytes` is the size of all, `limit_bytes` its limit. `failures` are builds that failed.
    """

    snapshots: tuple[ListedSnapshot, ...]
    disk_bytes: int
    limit_bytes: int
    building: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()

    def human(self) -> str:
        building = (f"{name} is being built" for name in self.building)
        return "\n".join([*self._table(), *building, *map(_failure_line, self.failures)])

    def _table(self) -> list[str]:
        if not self.snapshots:
            return [] if self.building else ["no snapshots; `edgeinfer warm MODEL` builds one"]
        rows = [("NAME", "ON DISK", "CONTEXT", "LAST USED", "STATE"), *map(_row, self.snapshots)]
        total = f"{format_bytes(self.disk_bytes)} of at most {format_bytes(self.limit_bytes)}"
        return [table(rows), total]


def _row(snapshot: ListedSnapshot) -> tuple[str, ...]:
    details = snapshot.details
    return (
        details.name,
        format_bytes(snapshot.disk_bytes),
        details.actual.get("n_ctx", ""),
        format_duration(max(0.0, time.time() - snapshot.last_used_s)) + " ago",
        snapshot.state,
    )


def _failure_line(failure: Failure) -> str:
    ago = format_duration(max(0.0, time.time() - failure.at_s))
    return (
        f"{failure.name} could not be built {ago} ago: {failure.message} "
        f"(tried again when something changes; to build it now: `{failure.command}`)"
    )


class SnapshotResult(Result, frozen=True, kw_only=True):
    snapshot: Details
    state: str
    disk_bytes: int

    def human(self) -> str:
        d = self.snapshot
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(d.created_s))
        took_s = sum(d.stages_ms.values()) / 1000
        size = f"{format_bytes(self.disk_bytes)} on disk, {format_bytes(d.memory_bytes)} of memory"
        rows = [
            ("name", d.name),
            ("model", d.model),
            ("state", self.state),
            ("built", f"{built}, in {took_s:.1f} s"),
            ("size", size),
            ("start", f"edgeinfer chat --snapshot {d.name}"),
            ("system prompt", " ".join(d.system.split())[:200] or "none"),
            ("made by", f"CRIU {d.criu}, {d.tier} tier"),
            ("folder", d.folder),
        ]
        chosen = ((_flag(name), value, d.reasons.get(name, "")) for name, value in d.actual.items())
        options = [("OPTION", "VALUE", "WHY"), *chosen]
        return f"{table(rows)}\n\n{table(options)}"


def _flag(field: str) -> str:
    named = (row.flag for row in LOAD_OPTIONS if row.field == field and row.flag)
    return next(named, field.replace("_", " "))


class SnapshotsVerifyResult(Result, frozen=True, kw_only=True):
    """Snapshots whose files, and answers to test prompts, are the same as when they were built.

    `name` has their names, joined with commas. `stale` has a message for each snapshot that was not
    checked, because it cannot be resumed here.
    """

    name: str
    files: int
    read_bytes: int
    stale: tuple[str, ...] = ()

    def human(self) -> str:
        read = f"{self.files:,} files, {format_bytes(self.read_bytes)}"
        good = f"{self.name}: {read}, unchanged since the build; answers are bit-identical"
        stale = (f"{reason}: not verified, and refused by launches" for reason in self.stale)
        return "\n".join([good if self.name else "no snapshot to verify can be resumed here", *stale])


class SnapshotsRemovedResult(Result, frozen=True, kw_only=True):
    removed: tuple[str, ...]
    freed_bytes: int

    def human(self) -> str:
        if not self.removed:
            return "nothing to remove"
        return f"removed {', '.join(self.removed)}; {format_bytes(self.freed_bytes)} freed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(
        dest="action", metavar="list|show|take|verify|rm|prune|export|import|trust|distrust"
    )

    def add(name: str, summary: str, *arguments: str) -> argparse.ArgumentParser:
        return add_action(actions, name, summary, " ".join(("snapshots", name, *arguments)))

    add("list", "list all snapshots (the default)")
    _add_name(add("show", "show one snapshot", "my-snapshot"))
    _add_take(add("take", "build one from a running process", "--name my-snapshot"))
    verify = add("verify", "compare every byte, including model and libraries, and the canary", "--all")
    _add_name(verify, nargs="*")
    add_option(verify, "--all", "verify every snapshot of this program")
    rm = add("rm", "remove snapshots", "my-snapshot")
    _add_name(rm, nargs="+")
    prune = add("prune", "remove unusable snapshots, and the oldest beyond the limit")
    add_option(prune, "--all", "remove every snapshot")
    for parser in (rm, prune):
        add_yes(parser)
    _add_transfer(add)


def _add_name(parser: argparse.ArgumentParser, **more: Any) -> None:
    help = "name of the snapshot, or of its model if that has only one"
    parser.add_argument("name", metavar="SNAPSHOT", help=help, **more)


def _add_transfer(add: Callable[..., argparse.ArgumentParser]) -> None:
    export = add("export", "write a signed snapshot to a folder or registry", "my-snapshot ~/exported")
    _add_name(export)
    export.add_argument("destination", metavar="DEST", help="a folder or oci://REGISTRY/NAME:TAG")
    bring = add("import", "import a snapshot of another machine, if you trust its signer", "~/exported")
    bring.add_argument("source", metavar="SRC", help="a folder, or oci://REGISTRY/NAME:TAG")
    for parser in (export, bring):
        add_quiet(parser)
    trust = add("trust", "list your key and trusted keys, or trust another key", "SHA256:…")
    trust.add_argument("fingerprint", nargs="?", default="", metavar="FINGERPRINT", help="SHA256:…")
    distrust = add("distrust", "stop trusting a key", "SHA256:…")
    distrust.add_argument("fingerprint", metavar="FINGERPRINT", help="SHA256:…, as `trust` lists it")


def _add_take(parser: argparse.ArgumentParser) -> None:
    help = "PID from `edgeinfer ps`, or a model (default: the running endpoint)"
    parser.add_argument("which", nargs="?", metavar="PID|NAME", help=help)
    parser.add_argument("--name", default="", help="name of the snapshot")
    parser.add_argument("--model", help="which model, if the process has several")
    add_quiet(parser)


def run(options: argparse.Namespace, host: EngineHost) -> Result:
    """Run the action typed after `snapshots` (default: `list`). Raises SnapshotError, UsageError."""
    action = options.action or "list"
    if action not in _ACTIONS:
        from edgeinfer.cli.verbs import snapshots_transfer  # slow import: 20 ms

        return snapshots_transfer.ACTIONS[action](options, host)
    return _ACTIONS[action](options, host)


def _list(_options: argparse.Namespace, host: EngineHost) -> SnapshotsResult:
    listed = registry.list_snapshots()
    return SnapshotsResult(
        snapshots=tuple(listed),
        disk_bytes=sum(s.disk_bytes for s in listed),
        limit_bytes=int(host.config.snapshots.max_total_gib * (1 << 30)),
        building=tuple(jobs.being_built()),
        failures=tuple(registry.list_current_failures()),
    )


def _show(options: argparse.Namespace, _host: EngineHost) -> SnapshotResult:
    folder = registry.find(options.name)
    state, size = registry.state_of(folder)[1], registry.disk_bytes(folder)
    return SnapshotResult(snapshot=registry.read_details(folder), state=state, disk_bytes=size)


def _verify(options: argparse.Namespace, _host: EngineHost) -> SnapshotsVerifyResult:
    if options.name and options.all:
        raise UsageError("leave out either the names or --all", hint=_VERIFY_ALL)
    if not (options.name or options.all):
        raise UsageError("name the snapshots to verify", hint=_VERIFY_ALL)
    chosen = registry.list_own() if options.all else [registry.find(name) for name in options.name]
    folders, stale = list[Path](), list[str]()
    faults, failed = list[str](), list[str]()
    for folder in chosen:
        try:
            faults += _differences(folder)
            folders.append(folder)
        except RestoreError as error:
            failed.append(f"{folder.name}: {error.message}")
        except SnapshotError as error:
            if not options.all:
                raise
            (stale if isinstance(error, SnapshotStaleError) else faults).append(error.message)
    if faults:
        raise SnapshotCorruptError("; ".join(faults + failed), hint=_FAULTY)
    if failed:
        raise RestoreError("; ".join(failed), hint=_NOT_RESUMED)
    details = [registry.read_details(folder) for folder in folders]
    read = {path for snapshot in details for path in snapshot.sources} | {
        f"{folder}/{name}"
        for folder, snapshot in zip(folders, details, strict=True)
        for name in snapshot.digests
    }
    return SnapshotsVerifyResult(
        name=", ".join(snapshot.name for snapshot in details),
        files=len(read),
        read_bytes=sum(map(os.path.getsize, read)),
        stale=tuple(stale),
    )


_VERIFY_ALL = "`edgeinfer snapshots verify --all` verifies every snapshot"
#: Hint if bytes or answers have changed for an unknown reason.
_FAULTY = (
    "if nothing was changed on purpose, suspect the disk or the memory; then pull the model, install "
    "edgeinfer, or build the snapshot (`edgeinfer warm`) again"
)
_NOT_RESUMED = (
    "its files are as they were built: run `edgeinfer doctor`, and verify it again when memory is "
    "free; if that fails too, build it again: `edgeinfer warm MODEL`"
)


def _differences(folder: Path) -> list[str]:
    """Return how a snapshot or its canary differs from the build, [] if equal. Raises SnapshotError."""
    if wrong := builder.wrong_files(folder):
        return [f"{folder.name}: {', '.join(wrong)} changed since it was built"]
    if not builder.computes_canary(folder):
        return [f"{folder.name} computes different bits than at its build, from the same files"]
    if again := ", ".join(builder.repeated_randomness(folder)):
        return [f"{folder.name}: two resumed processes got the same random bytes from {again}"]
    return []


def _rm(options: argparse.Namespace, _host: EngineHost) -> SnapshotsRemovedResult:
    matches = [registry.find(name) for name in options.name]
    confirm(f"Remove {', '.join(storage.name_of(f.name) for f in matches)}?", yes=options.yes)
    return _remove(matches)


def _remove(folders: list[Path]) -> SnapshotsRemovedResult:
    freed = sum(registry.disk_bytes(folder) for folder in folders)
    for folder in folders:
        registry.remove_snapshot(folder)
    removed = tuple(storage.name_of(folder.name) for folder in folders)
    return SnapshotsRemovedResult(removed=removed, freed_bytes=freed)


def _prune(options: argparse.Namespace, host: EngineHost) -> SnapshotsRemovedResult:
    root = paths.snapshots_dir()
    if not root.is_dir():
        raise SnapshotMissingError("there are no snapshots", hint="`edgeinfer warm MODEL` builds one")
    if options.all:
        confirm("Remove every snapshot?", yes=options.yes)
        return _remove(registry.by_last_use(root))
    sizes = {folder: registry.disk_bytes(folder) for folder in registry.by_last_use(root)}
    removed = [*registry.remove_stale(root), *registry.make_room(root, host.config.snapshots)]
    freed = sum(size for folder, size in sizes.items() if not folder.exists())
    return SnapshotsRemovedResult(removed=tuple(removed), freed_bytes=freed)


_PS = "`edgeinfer ps` shows what runs"


class SnapshotsTakeResult(TimedResult, frozen=True, kw_only=True):
    """A snapshot of process `pid`. `was_built` is False if there was an identical one already."""

    pid: int
    snapshot: Details
    was_built: bool

    def human(self) -> str:
        d = self.snapshot
        size = f"{format_bytes(d.disk_bytes)} on disk"
        outcome = f"was taken of process {self.pid}"
        if not self.was_built:
            outcome = f"has what process {self.pid} has loaded: nothing has changed since its build"
        lines = [f"{d.name} {outcome}; {size}, {self.wall_s:.1f} s"]
        if storage.user_name_of(d.name):
            lines.append(f"to start from it: edgeinfer serve --snapshot {d.name}")
        return "\n".join(lines)


def _take(options: argparse.Namespace, host: EngineHost) -> SnapshotsTakeResult:
    storage.refuse_bad_name(options.name)
    pid = _resolve_pid(options.which)
    which = options.which if options.which and running.has_loaded(pid, options.which) else None
    loaded = _loaded_model(pid, options.model or which)
    criu.available()
    progress = StageProgress(sys.stderr, quiet=options.quiet, note="in the background: idle cores only")
    with stoppable("stopped; nothing of the snapshot is kept"), progress:
        snapshot, was_built = build(loaded, options.name, host.config.snapshots, progress.report)
    return SnapshotsTakeResult(pid=pid, snapshot=snapshot, was_built=was_built)


def _resolve_pid(which: str | None) -> int:
    if which is not None and which.isdecimal():
        return _require_own_process(int(which))
    launches = [launch for launch in running.processes() if launch.verb in LAUNCH_VERBS]
    if which is None:
        matches = [launch for launch in launches if launch.verb == "serve"]
        no_match, ambiguous = "no endpoint is running", "several endpoints are running"
    else:
        matches = [
            run for run in launches if which in run.arguments or running.has_loaded(run.pid, which)
        ]
        no_match = f"no running process has loaded {which}"
        ambiguous = f"several processes have loaded {which}"
    if len(matches) == 1:
        return _require_own_process(matches[0].pid)
    if not matches:
        raise UsageError(no_match, hint=_PS)
    pids = ", ".join(str(launch.pid) for launch in matches)
    raise UsageError(f"{ambiguous}: {pids}", hint=f"e.g. `edgeinfer snapshots take {matches[0].pid}`")


def _require_own_process(pid: int) -> int:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise UsageError(f"there is no process {pid}", hint=_PS) from None
    if owner != os.getuid():
        hint = f"run the command as that user: `edgeinfer snapshots take {pid}`"
        raise UsageError(f"process {pid} belongs to another user", hint=hint)
    if not running.shares_folders(pid):
        raise UsageError(
            f"process {pid} uses another data folder",
            hint="set EDGEINFER_HOME (or HOME, XDG_CACHE_HOME) as it was set for that process",
        )
    return pid


def _loaded_model(pid: int, model: str | None) -> ProcessDescription:
    loaded = running.loaded_below(pid)
    matches = [process for process in loaded if model is None or process.is_of(model)]
    candidates = [process for process in matches if not process.is_worker] or matches
    if not candidates:
        outcome = f"has not loaded {model}" if model and loaded else "has loaded no model"
        problem = f"process {pid} {outcome}"
        raise UsageError(problem, hint=f"send a request to load the model, or choose another: {_PS}")
    if len({process.model for process in candidates}) > 1:
        names = ", ".join(sorted(process.model for process in candidates))
        raise UsageError(f"process {pid} has several models: {names}", hint="name one: `--model NAME`")
    if candidates[-1].program != fingerprint.program_tag():
        raise SnapshotError(
            f"process {pid} runs another edgeinfer build: only that build can resume its snapshots",
            hint="run this command with the `edgeinfer` that started it",
        )
    return candidates[-1]


_ACTIONS: dict[str, Callable[[argparse.Namespace, EngineHost], Result]] = {
    "list": _list,
    "show": _show,
    "take": _take,
    "verify": _verify,
    "rm": _rm,
    "prune": _prune,
}
