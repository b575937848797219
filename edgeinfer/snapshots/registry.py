"""The registry of snapshots: read, find and prune them, and record failed builds.

`format` describes the folders. SNAPSHOTS/.NAME-PROGRAM.failed holds a `Failure` in JSON, until a build
of NAME succeeds or one of its inputs changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from itertools import chain
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.errors import (
    DiskFullError,
    EdgeInferError,
    InterruptedByUser,
    OutOfMemoryError,
    SnapshotCorruptError,
    SnapshotMissingError,
    SnapshotsUnavailableError,
)
from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes, write_durably
from edgeinfer.snapshot_format import fingerprint, format


def build_lock(root: Path, name: str) -> Path:
    """Return the file that this program locks while it builds the snapshot `name`."""
    return root / f".{name}-{fingerprint.program_tag()}.lock"


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A built snapshot. `memory_bytes` includes holes, `disk_bytes` does not.

    `system` is the prefilled system prompt, `depends_on` the digest of all inputs: program, machine,
    files, options and system prompt. `digests` are those of its own files, `sources` those of the files
    that it maps or was built from, by path; `canary` is the digest of `LoadedModel.canary`'s result.
    """

    name: str
    model: str
    folder: str
    created_s: float
    tier: str
    criu: str
    sha256: str
    requested: dict[str, str]
    actual: dict[str, str]
    reasons: dict[str, str]
    system: str = ""
    system_tokens: int
    memory_bytes: int
    images_bytes: int
    disk_bytes: int
    mappings: int
    digests: dict[str, str]
    stages_ms: dict[str, float]
    depends_on: str = ""
    sources: dict[str, str] = {}
    canary: str = ""


class ListedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot with its state: "ready", or why it cannot be used here. `last_used_s` is Unix time."""

    details: Details
    state: str
    fresh: bool
    last_used_s: float
    disk_bytes: int


def read_details(folder: Path) -> Details:
    """Read snapshot.json. Raises SnapshotMissingError, SnapshotUnsafeError, SnapshotCorruptError."""
    path = folder / format.DETAILS
    format.refuse_unsafe(str(path), directory=False)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Details)
    except msgspec.MsgspecError as error:
        raise SnapshotCorruptError(f"{path} is invalid: {error}") from error


def is_own(folder: Path) -> bool:
    """Return whether this program built the snapshot."""
    return format.program_of(folder.name) == fingerprint.program_tag()


def is_named(folder: Path) -> bool:
    """Return whether a user gave the snapshot its name."""
    try:
        manifest = format.read_manifest(str(folder))
    except EdgeInferError:
        return False
    return format.has_user_name(manifest.name, manifest.model, manifest.requested)


def is_orphan(folder: Path) -> bool:
    """Return whether the program that built the snapshot, or its environment, was removed.

    A snapshot with an unreadable manifest is not an orphan.
    """
    try:
        return not (is_own(folder) or all(map(os.path.exists, _program_paths_of(folder))))
    except EdgeInferError:
        return False


def _program_paths_of(folder: Path) -> list[str]:
    """Return the paths of the builder's program and environment. Raises SnapshotError."""
    keys = format.read_manifest(str(folder)).keys
    return [path for path in (keys.get("program"), keys.get("environment")) if path]


def state_of(folder: Path) -> tuple[bool, str]:
    """Return whether this program can resume the snapshot now, and "ready" or the reason against it."""
    try:
        if is_orphan(folder):
            return False, "the program that built it was removed"
        if not is_own(folder):
            return False, f"belongs to another program: {_program_paths_of(folder)[0]}"
        manifest = format.read_manifest(str(folder))
        fingerprint.refuse_stale(manifest, str(folder))
    except EdgeInferError as error:
        return False, error.message
    return True, "ready"


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the folder's files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def last_used_s(folder: Path) -> float:
    """Return the time of its last resume, or of its build (Unix time)."""
    try:
        return os.lstat(folder / format.LOCK).st_mtime
    except OSError:
        return 0.0


def list_snapshots() -> list[ListedSnapshot]:
    """List every snapshot by name: the newest generation for each name and program."""
    newest: dict[tuple[str, str], str] = {}
    for name, folders in format.generations(str(paths.snapshots_dir())).items():
        for generation in folders:
            newest.setdefault((name, format.program_of(generation)), generation)
    rows = []
    for folder in map(Path, newest.values()):
        try:
            details = read_details(folder)
        except EdgeInferError:
            continue
        fresh, state = state_of(folder)
        used, n_bytes = last_used_s(folder), disk_bytes(folder)
        row = ListedSnapshot(
            details=details, state=state, fresh=fresh, last_used_s=used, disk_bytes=n_bytes
        )
        rows.append(row)
    return sorted(rows, key=lambda item: item.details.name)


def list_own() -> list[Path]:
    """List the newest generation of each of this program's snapshots, including unusable ones."""
    by_name = format.generations(str(paths.snapshots_dir()), fingerprint.program_tag())
    return [Path(folders[0]) for _, folders in sorted(by_name.items())]


def find(name: str) -> Path:
    """Find a snapshot by full or given name, or a model's only one. Raises SnapshotMissingError."""
    root = str(paths.snapshots_dir())
    all_of = format.generations(root) | format.generations(root, fingerprint.program_tag())
    of_model = [key for key in all_of if format.model_prefix_of(key) == format.model_prefix(name)]
    matching = format.matching_names(all_of, name) or of_model
    if len(matching) == 1:
        return Path(all_of[matching[0]][0])
    if matching:
        hint = f"name one of: {', '.join(sorted(matching))}"
        raise SnapshotMissingError(f"{name} is the name of several snapshots", hint=hint)
    hint = "`edgeinfer snapshots list` shows them; `edgeinfer warm MODEL` builds one"
    raise SnapshotMissingError(f"there is no snapshot named {name}", hint=hint)


_GIB = 1 << 30
#: Disk space (bytes) that a build leaves free.
DISK_MARGIN_BYTES = 4 * _GIB


def remove_snapshot(folder: Path) -> None:
    """Hide the snapshot, then delete it. Processes resumed from it continue."""
    (folder / format.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_snapshots_of(model: str) -> list[str]:
    """Remove the snapshots of a removed model, which cannot be resumed; return their names."""
    for failure in list_failures():
        if format.model_prefix_of(failure.name) == format.model_prefix(model):
            forget_failure(failure.name)
    removed = []
    for name, folders in format.generations().items():
        if format.model_prefix_of(name) == format.model_prefix(model):
            for folder in folders:
                remove_snapshot(Path(folder))
            removed.append(name)
    return removed


def drop_older(root: Path, name: str) -> None:
    """Remove all but the newest generation of this program's snapshot `name`."""
    for folder in format.generations(str(root), fingerprint.program_tag()).get(name, [])[1:]:
        remove_snapshot(Path(folder))


def by_last_use(root: Path, keep: str = "") -> list[Path]:
    """List all but our `keep` in order of removal: orphans, unnamed ones, then the longest unused."""
    current = format.generations(str(root), fingerprint.program_tag()).get(keep, [])
    everything = chain(*format.generations(str(root)).values())
    folders = [Path(folder) for folder in everything if folder not in current]
    return sorted(folders, key=lambda f: (not is_orphan(f), is_named(f), last_used_s(f)))


def make_room(root: Path, config: SnapshotsConfig, keep: str = "", need_bytes: int = 0) -> list[str]:
    """Remove the least recently used until `need_bytes` more fit limit and disk; return their names."""
    sizes = {folder: disk_bytes(folder) for folder in by_last_use(root)}
    total, removed = sum(sizes.values()) + need_bytes, []
    for folder in by_last_use(root, keep):
        is_on_disk = free_bytes(root) - need_bytes >= DISK_MARGIN_BYTES
        if is_on_disk and total <= config.max_total_gib * _GIB:
            break
        total -= sizes.get(folder, 0)
        removed.append(format.name_of(folder.name))
        remove_snapshot(folder)
    return removed


def remove_stale(root: Path) -> list[str]:
    """Remove this program's unusable snapshots, and orphans; return their names."""
    removed = []
    for folder in by_last_use(root):
        if is_orphan(folder) or (is_own(folder) and not state_of(folder)[0]):
            removed.append(format.name_of(folder.name))
            remove_snapshot(folder)
    return removed


_FAILURE_SUFFIX = ".failed"
#: Temporary failures: the next build may succeed although no input has changed.
_PASSING = (DiskFullError, InterruptedByUser, OutOfMemoryError, SnapshotsUnavailableError)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed build. `at_s` is Unix time, `depends_on` the digest of its inputs."""

    name: str
    model: str
    message: str
    at_s: float
    depends_on: str


def killed_error(what: str) -> OutOfMemoryError:
    """Make the error for a killed process of a build; it is not recorded."""
    return OutOfMemoryError(f"{what} was killed; the kernel does that when memory is short")


def record_failure(name: str, model: str, depends_on: str, error: EdgeInferError) -> None:
    """Record a failed build, unless `error` is temporary."""
    if not isinstance(error, _PASSING):
        failure = Failure(
            name=name, model=model, message=error.message, at_s=time.time(), depends_on=depends_on
        )
        write_durably(_failure_path(name), msgspec.json.encode(failure), 0o600)


def forget_failure(name: str) -> None:
    _failure_path(name).unlink(missing_ok=True)


def list_failures() -> list[Failure]:
    """List this program's failures by name."""
    failures = []
    for path in sorted(paths.snapshots_dir().glob(_failure_path("*").name)):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # the file was removed meanwhile
            failures.append(msgspec.json.decode(path.read_bytes(), type=Failure))
    return failures


def _failure_path(name: str) -> Path:
    return paths.snapshots_dir() / f".{name}-{fingerprint.program_tag()}{_FAILURE_SUFFIX}"
