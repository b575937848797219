"""The snapshots on disk: find, list and remove them, and record failed builds.

`snapshot_format.storage` describes the folders. SNAPSHOTS/.NAME-PROGRAM.failed is a `Failure` in JSON:
no background build repeats that build until one of its inputs changes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from itertools import chain
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import adapters_of
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
from edgeinfer.platform.disk import free_bytes, read_regular, write_durably
from edgeinfer.snapshot_format import fingerprint, storage


def build_lock(root: Path, name: str) -> Path:
    """Return the path of the file that is locked while this installation builds snapshot `name`."""
    return root / f".{name}-{fingerprint.program_tag()}.lock"


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """The content of snapshot.json: the snapshot, its inputs, and how long each stage took (ms).

    `sha256` is that of the model, `depends_on` that of all inputs: program, machine, files, options and
    system prompt. `digests` has the SHA-256 of each file of the snapshot, `sources` that of each file
    that its process has mapped or read, both by path, `canary` that of `LoadedModel.canary`.
    `memory_bytes` is the size of `memory.img` with its holes, `disk_bytes` the disk space of all files.
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
    """A snapshot as `snapshots list` shows it. `last_used_s` is Unix time.

    `state` is "ready", or why it cannot be resumed now (then `fresh` is false).
    """

    details: Details
    state: str
    fresh: bool
    last_used_s: float
    disk_bytes: int


def read_details(folder: Path) -> Details:
    """Read snapshot.json. Raises SnapshotMissingError, SnapshotUnsafeError, SnapshotCorruptError."""
    path = folder / storage.DETAILS
    paths.refuse_unsafe(str(path), directory=False)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Details)
    except msgspec.MsgspecError as error:
        raise SnapshotCorruptError(f"{path} is invalid: {error}") from error


def is_own(folder: Path) -> bool:
    """Return whether this installation of edgeinfer built the snapshot."""
    return storage.program_of(folder.name) == fingerprint.program_tag()


def is_orphan(folder: Path) -> bool:
    """Return whether the program or venv that built the snapshot was removed; False if unknown."""
    try:
        return not (is_own(folder) or all(map(os.path.exists, _program_paths_of(folder))))
    except EdgeInferError:
        return False


def _program_paths_of(folder: Path) -> list[str]:
    """Return the paths of the program and venv that built the snapshot. Raises SnapshotError."""
    keys = storage.read_manifest(str(folder)).keys
    return [path for path in (keys.get("program"), keys.get("environment")) if path]


def state_of(folder: Path) -> tuple[bool, str]:
    """Return whether this installation can resume the snapshot now, and "ready" or why it cannot."""
    try:
        if is_orphan(folder):
            return False, "the program that built it was removed"
        if not is_own(folder):
            return False, f"belongs to another program: {_program_paths_of(folder)[0]}"
        manifest = storage.read_manifest(str(folder))
        fingerprint.refuse_stale(manifest, str(folder))
    except EdgeInferError as error:
        return False, error.message
    return True, "ready"


def is_useless(folder: Path) -> bool:
    """Return whether no installation can resume the snapshot.

    That is so if the installation that built it was removed, or is this one and refuses it now.
    """
    return is_orphan(folder) or (is_own(folder) and not state_of(folder)[0])


def disk_bytes(folder: Path) -> int:
    """Return the disk space (bytes) of a snapshot's files, without holes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def last_used_s(folder: Path) -> float:
    """Return when the snapshot was last resumed, or built if it never was (Unix time); 0 if unknown."""
    try:
        return os.lstat(folder / storage.LOCK).st_mtime
    except OSError:
        return 0.0


def list_snapshots() -> list[ListedSnapshot]:
    """List all installations' snapshots, sorted by name: the newest build of each, if readable."""
    newest: dict[tuple[str, str], str] = {}
    for name, folders in storage.generations(str(paths.snapshots_dir())).items():
        for generation in folders:
            newest.setdefault((name, storage.program_of(generation)), generation)
    snapshots = []
    for folder in map(Path, newest.values()):
        with contextlib.suppress(EdgeInferError):
            details, (fresh, state) = read_details(folder), state_of(folder)
            used, n_bytes = last_used_s(folder), disk_bytes(folder)
            snapshots.append(
                ListedSnapshot(
                    details=details, state=state, fresh=fresh, last_used_s=used, disk_bytes=n_bytes
                )
            )
    return sorted(snapshots, key=lambda snapshot: snapshot.details.name)


def list_own() -> list[Path]:
    """List the folders of this installation's snapshots, sorted by name: the newest build of each.

    Snapshots that cannot be resumed are included.
    """
    by_name = storage.generations(str(paths.snapshots_dir()), fingerprint.program_tag())
    return [Path(folders[0]) for _, folders in sorted(by_name.items())]


def find(name: str) -> Path:
    """Return the folder of the snapshot with this full name, this user-given name, or this model.

    Raises SnapshotMissingError if there is none, or if several have the user-given name or the model.
    """
    root = str(paths.snapshots_dir())
    folders = storage.generations(root) | storage.generations(root, fingerprint.program_tag())
    of_model = [key for key in folders if storage.model_prefix_of(key) == storage.model_prefix(name)]
    matching = storage.matching_names(folders, name) or of_model
    if len(matching) == 1:
        return Path(folders[matching[0]][0])
    if matching:
        hint = f"name one of: {', '.join(sorted(matching))}"
        raise SnapshotMissingError(f"{name} is the name of several snapshots", hint=hint)
    hint = "`edgeinfer snapshots list` shows all snapshots; `edgeinfer warm MODEL` builds one"
    raise SnapshotMissingError(f"there is no snapshot named {name}", hint=hint)


_GIB = 1 << 30
#: Disk space (bytes) that stays free when a snapshot is built.
DISK_MARGIN_BYTES = 4 * _GIB


def remove_snapshot(folder: Path) -> None:
    """Delete a snapshot, its manifest first. Processes that were resumed from it continue."""
    (folder / storage.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_snapshots_of(model: str) -> list[str]:
    """Remove all installations' snapshots of a model, and its failure records; return the names."""
    for failure in list_failures():
        if storage.model_prefix_of(failure.name) == storage.model_prefix(model):
            forget_failure(failure.name)
    removed = []
    for name, folders in storage.generations().items():
        if storage.model_prefix_of(name) == storage.model_prefix(model):
            for folder in folders:
                remove_snapshot(Path(folder))
            removed.append(name)
    return removed


def drop_older(root: Path, name: str) -> None:
    """Remove all builds of this installation's snapshot `name` except the newest."""
    for folder in storage.generations(str(root), fingerprint.program_tag()).get(name, [])[1:]:
        remove_snapshot(Path(folder))


def by_last_use(root: Path) -> list[Path]:
    """List all snapshots in the order in which `make_room` removes them.

    Unusable ones come first, then unnamed ones, then ones that a user named; in each group, the least
    recently used first.
    """
    folders = map(Path, chain(*storage.generations(str(root)).values()))

    def rank(folder: Path) -> tuple[bool, bool, float]:
        user_name = storage.user_name_of(storage.name_of(folder.name))
        return not is_useless(folder), bool(user_name), last_used_s(folder)

    return sorted(folders, key=rank)


def make_room(root: Path, config: SnapshotsConfig, keep: str = "", need_bytes: int = 0) -> list[str]:
    """Remove snapshots until `need_bytes` more would fit the configured limit and the disk.

    The order is that of `by_last_use`. This installation's snapshot named `keep` stays, so there may
    still be too little space. Returns the names of the removed snapshots.
    """
    kept_folders = storage.generations(str(root), fingerprint.program_tag()).get(keep, [])
    sizes = {folder: disk_bytes(folder) for folder in by_last_use(root)}
    total, removed = sum(sizes.values()) + need_bytes, []
    for folder, size in sizes.items():
        is_on_disk = free_bytes(root) - need_bytes >= DISK_MARGIN_BYTES
        if is_on_disk and total <= config.max_total_gib * _GIB:
            break
        if str(folder) not in kept_folders:
            total -= size
            removed.append(storage.name_of(folder.name))
            remove_snapshot(folder)
    return removed


def remove_stale(root: Path) -> list[str]:
    """Remove all snapshots that no installation can resume; return their names."""
    removed = []
    for folder in by_last_use(root):
        if is_useless(folder):
            removed.append(storage.name_of(folder.name))
            remove_snapshot(folder)
    return removed


_FAILURE_SUFFIX = ".failed"
#: Errors that may go away by themselves: a build that failed with one of them may be repeated.
_TRANSIENT = (DiskFullError, InterruptedByUser, OutOfMemoryError, SnapshotsUnavailableError)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed build. `message` says why, `command` repeats the build.

    `at_s` is the Unix time of the failure, `depends_on` the SHA-256 of the inputs.
    """

    name: str
    model: str
    message: str
    at_s: float
    depends_on: str
    command: str


def killed_error(process_name: str) -> OutOfMemoryError:
    """Make the error for a process that was killed by SIGKILL, probably because memory was short.

    `process_name` is its name in the message.
    """
    return OutOfMemoryError(f"{process_name} was killed; the kernel does that when memory is short")


def record_failure(error: EdgeInferError, **build: str) -> None:
    """Record a failed build, so that no background build repeats it with the same inputs.

    `build` has the other fields of `Failure`: `name`, `model`, `depends_on`, `command`. An error that
    may go away by itself, such as a full disk, is not recorded.
    """
    if not isinstance(error, _TRANSIENT):
        failure = Failure(message=error.message, at_s=time.time(), **build)
        write_durably(_failure_path(failure.name), msgspec.json.encode(failure), 0o600)


def forget_failure(name: str) -> None:
    _failure_path(name).unlink(missing_ok=True)


def list_failures() -> list[Failure]:
    """List this installation's failed builds by snapshot name; skip records that cannot be read."""
    failures = []
    for path in sorted(paths.snapshots_dir().glob(_failure_path("*").name)):
        # skip a record that another process has just removed, or that another version of edgeinfer has
        # written
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            failures.append(msgspec.json.decode(read_regular(path), type=Failure))
    return failures


def list_current_failures() -> list[Failure]:
    """List the failed builds of `list_failures` whose model and adapters were not removed since."""
    return [failure for failure in list_failures() if has_inputs(failure.command)]


def has_inputs(warm_command: str) -> bool:
    """Return whether the model and the adapters of `warm_command` are on this machine.

    The command has the form `edgeinfer warm MODEL --lora=…`.
    """
    from edgeinfer.models.reference import resolve  # slow import (30 ms), needed only after a failure

    arguments = shlex.split(warm_command)[2:]
    lora = [flag.removeprefix("--lora=") for flag in arguments if flag.startswith("--lora=")]
    try:
        has_model = all(any(map(Path.exists, resolve(model).parts)) for model in arguments[:1])
    except EdgeInferError:  # the model's record is damaged
        has_model = True
    return has_model and all(os.path.exists(path) for path, _ in adapters_of(",".join(lora)).values())


def _failure_path(name: str) -> Path:
    return paths.snapshots_dir() / f".{name}-{fingerprint.program_tag()}{_FAILURE_SUFFIX}"
