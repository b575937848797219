"""What the commands say of snapshots: a value each, read from the folders `format` describes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from edgeinfer import paths
from edgeinfer.errors import EdgeInferError, SnapshotCorruptError, SnapshotMissingError
from edgeinfer.snapshots.shelf import fingerprint, format


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A built snapshot. Sizes in bytes: `memory_bytes` apparent, `disk_bytes` without holes. `reasons`
    explains `actual`.
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
    system_tokens: int
    memory_bytes: int
    images_bytes: int
    disk_bytes: int
    mappings: int
    digests: dict[str, str]
    stages_ms: dict[str, float]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot with its state here and now: "ready", or why it is refused. `last_used_s` is Unix
    time.
    """

    details: Details
    state: str
    fresh: bool
    last_used_s: float
    disk_bytes: int


def read_details(folder: Path) -> Details:
    """Raises SnapshotMissingError, SnapshotUnsafeError, SnapshotCorruptError."""
    path = folder / format.DETAILS
    format.refuse_unsafe(str(path), directory=False)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Details)
    except msgspec.MsgspecError as error:
        raise SnapshotCorruptError(f"{path} cannot be understood: {error}") from error


def state_of(folder: Path) -> tuple[bool, str]:
    """Whether the snapshot may be resumed now, and "ready" or the reason why not."""
    try:
        manifest = format.read_manifest(str(folder))
        fingerprint.refuse_stale(manifest, str(folder))
    except EdgeInferError as error:
        return False, error.message
    return True, "ready"


def disk_bytes(folder: Path) -> int:
    """What the folder's files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def last_used_s(folder: Path) -> float:
    """When it was last resumed, or built."""
    try:
        return os.lstat(folder / format.LOCK).st_mtime
    except OSError:
        return 0.0


def listed() -> list[Listed]:
    """Every snapshot, newest generation of each name, by name."""
    found = []
    for folders in format.generations(str(paths.snapshots_dir())).values():
        folder = Path(folders[0])
        try:
            details = read_details(folder)
        except EdgeInferError:
            continue
        fresh, state = state_of(folder)
        used = last_used_s(folder)
        found.append(
            Listed(
                details=details,
                state=state,
                fresh=fresh,
                last_used_s=used,
                disk_bytes=disk_bytes(folder),
            )
        )
    return sorted(found, key=lambda item: item.details.name)


def find(name: str) -> Path:
    """The folder of the snapshot, or of the only one of a model, that `name` says. Raises
    SnapshotMissingError.
    """
    all_of = format.generations(str(paths.snapshots_dir()))
    if name in all_of:
        return Path(all_of[name][0])
    of_model = [key for key in all_of if format.model_part(key) == format.safe_name(name)]
    if len(of_model) == 1:
        return Path(all_of[of_model[0]][0])
    if of_model:
        raise SnapshotMissingError(
            f"{name} has several snapshots", hint=f"name one: {', '.join(sorted(of_model))}"
        )
    raise SnapshotMissingError(
        f"there is no snapshot called {name}", hint="run `edgeinfer snapshots list`"
    )
