"""`edgeinfer snapshots list|show|verify|rm|prune`; `take` and `transfer` have the others."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from edgeinfer.commands.table import table
from edgeinfer.errors import SnapshotCorruptError, SnapshotMissingError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.snapshots.building import build_order, verify
from edgeinfer.snapshots.shelf import failures, format, prune, records
from edgeinfer.snapshots.shelf.failures import Failure
from edgeinfer.snapshots.shelf.records import Details, Listed
from edgeinfer.system import paths
from edgeinfer.units import format_bytes, format_duration


class SnapshotsResult(Result, frozen=True, kw_only=True):
    """Every snapshot, with its state on this machine now."""

    kind: ClassVar[str] = "snapshots"

    snapshots: tuple[Listed, ...]
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
        rows = [
            ("NAME", "ON DISK", "APPARENT", "CONTEXT", "LAST USED", "STATE"),
            *map(_row, self.snapshots),
        ]
        total = f"{format_bytes(self.disk_bytes)} of at most {format_bytes(self.limit_bytes)}"
        return [table(rows), total]


def _row(snapshot: Listed) -> tuple[str, ...]:
    details = snapshot.details
    return (
        details.name,
        format_bytes(snapshot.disk_bytes),
        format_bytes(details.memory_bytes + details.images_bytes),
        details.actual.get("n_ctx", ""),
        format_duration(max(0.0, time.time() - snapshot.last_used_s)) + " ago",
        snapshot.state,
    )


def _failure_line(failure: Failure) -> str:
    ago = format_duration(max(0.0, time.time() - failure.at_s))
    return (
        f"{failure.name} could not be built {ago} ago: {failure.message} "
        f"(tried again when something changes; now: `edgeinfer warm {failure.model}`)"
    )


class SnapshotResult(Result, frozen=True, kw_only=True):
    """One snapshot."""

    kind: ClassVar[str] = "snapshot"

    snapshot: Details
    state: str
    disk_bytes: int

    def human(self) -> str:
        plain = msgspec.to_builtins(self.snapshot)
        for not_for_reading in ("digests", "depends_on"):
            plain.pop(not_for_reading)
        lines = [
            f"{name}: {_words(value)}" for name, value in plain.items() if value not in ({}, "", [])
        ]
        return "\n".join([f"state: {self.state}", f"on disk: {format_bytes(self.disk_bytes)}", *lines])


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


class VerifyResult(Result, frozen=True, kw_only=True):
    """Every byte was read and compared."""

    kind: ClassVar[str] = "snapshots-verify"

    name: str
    files: int
    read_bytes: int

    def human(self) -> str:
        read = f"{self.files} files, {format_bytes(self.read_bytes)}"
        return f"{self.name}: {read}, all as they were built; resumed twice"


class RemovedResult(Result, frozen=True, kw_only=True):
    """Snapshots that are gone now."""

    kind: ClassVar[str] = "snapshots-removed"

    removed: tuple[str, ...]
    freed_bytes: int

    def human(self) -> str:
        if not self.removed:
            return "nothing to remove"
        return f"removed {', '.join(self.removed)}; {format_bytes(self.freed_bytes)} freed"


def snapshots(options: argparse.Namespace, host: Host) -> Result:
    """Raises SnapshotMissingError, SnapshotCorruptError, SnapshotStaleError, SnapshotUnsafeError; what
    `take` and `transfer` raise.
    """
    action = options.action or "list"
    if action in ("export", "import", "trust"):
        return _transfer(action, options, host)
    if action == "show":
        return _show(options.name)
    if action == "take":
        from edgeinfer.commands.snapshots.take import take  # a file of its own

        return take(options, host)
    if action == "verify":
        return _verify(options.name)
    if action == "rm":
        return _remove([records.find(name) for name in options.name])
    if action == "prune":
        return _prune(options, host)
    return _list(host)


def _transfer(action: str, options: argparse.Namespace, host: Host) -> Result:
    from edgeinfer.commands.snapshots import transfer  # archives and signatures: 20 ms

    verbs = {"export": transfer.export, "import": transfer.import_, "trust": transfer.trusted}
    return verbs[action](options, host)


def _list(host: Host) -> SnapshotsResult:
    found = records.listed()
    return SnapshotsResult(
        snapshots=tuple(found),
        disk_bytes=sum(s.disk_bytes for s in found),
        limit_bytes=int(host.config.snapshots.max_total_gib * (1 << 30)),
        building=tuple(build_order.being_built()),
        failures=tuple(failures.listed()),
    )


def _show(name: str) -> SnapshotResult:
    folder = records.find(name)
    return SnapshotResult(
        snapshot=records.read_details(folder),
        state=records.state_of(folder)[1],
        disk_bytes=records.disk_bytes(folder),
    )


def _verify(name: str) -> VerifyResult:
    folder = records.find(name)
    wrong = verify.wrong_files(folder)
    if wrong:
        raise SnapshotCorruptError(
            f"{', '.join(wrong)} of {folder.name} is not what was built",
            hint=f"build it again: `edgeinfer warm {name}`",
        )
    repeated = verify.repeated_randomness(folder)
    if repeated:
        raise SnapshotCorruptError(
            f"two processes resumed from {folder.name} draw the same from {', '.join(repeated)}"
        )
    manifest = format.read_manifest(str(folder))
    return VerifyResult(
        name=manifest.name, files=len(manifest.images), read_bytes=sum(manifest.images.values())
    )


def _remove(folders: list[Path]) -> RemovedResult:
    freed = sum(records.disk_bytes(folder) for folder in folders)
    for folder in folders:
        prune.remove(folder)
    return RemovedResult(removed=tuple(format.name_of(f.name) for f in folders), freed_bytes=freed)


def _prune(options: argparse.Namespace, host: Host) -> RemovedResult:
    root = paths.snapshots_dir()
    if not root.is_dir():
        raise SnapshotMissingError("there are no snapshots", hint="")
    if options.all:
        return _remove(prune.by_last_use(root))
    sizes = {folder: records.disk_bytes(folder) for folder in prune.by_last_use(root)}
    removed = [*prune.stale(root), *prune.to_limit(root, host.config.snapshots)]
    freed = sum(size for folder, size in sizes.items() if not folder.exists())
    return RemovedResult(removed=tuple(removed), freed_bytes=freed)
