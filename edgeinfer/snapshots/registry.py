"""What the commands say of snapshots: a value each, read from the folders `format` describes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from edgeinfer.errors import EdgeInferError, SnapshotCorruptError, SnapshotMissingError
from edgeinfer.platform import paths
from edgeinfer.snapshots import fingerprint, format


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A built snapshot. `memory_bytes` counts holes, `disk_bytes` does not.

    `system` is the system prompt computed in it, `depends_on` the digest of program, machine, files,
    options and system prompt it was built of.
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


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, and "ready" or why it is refused here. `last_used_s` is Unix time."""

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


def is_own(folder: Path) -> bool:
    """Whether this program built the snapshot."""
    return format.program_of(folder.name) == fingerprint.program_tag()


def is_named(folder: Path) -> bool:
    """Whether a person gave the snapshot its name."""
    try:
        manifest = format.read_manifest(str(folder))
    except EdgeInferError:
        return False
    return format.is_given(manifest.name, manifest.model, manifest.requested)


def is_orphan(folder: Path) -> bool:
    """Whether the program that built the snapshot, or its environment, is not there any more.

    A snapshot whose manifest cannot be read is no orphan, unless no program can own it.
    """
    if is_own(folder):
        return False
    if not format.program_of(folder.name):
        return True
    try:
        return not all(map(os.path.exists, _program_places(folder)))
    except EdgeInferError:
        return False


def _program_places(folder: Path) -> list[str]:
    """Where the builder's program and environment lie. Raises what `read_manifest` raises."""
    keys = format.read_manifest(str(folder)).keys
    return [place for place in (keys.get("program"), keys.get("environment")) if place]


def state_of(folder: Path) -> tuple[bool, str]:
    """Whether this program may resume the snapshot now, and "ready" or the reason why not."""
    try:
        if is_orphan(folder):
            return False, "the program that built it is gone"
        if not is_own(folder):
            return False, f"of another program: {_program_places(folder)[0]}"
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
    """Every snapshot by name: of each name and program the newest generation."""
    found = []
    for folder in map(Path, _newest_of_each()):
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


def _newest_of_each() -> list[str]:
    newest: dict[tuple[str, str], str] = {}
    for name, folders in format.generations(str(paths.snapshots_dir())).items():
        for folder in folders:
            newest.setdefault((name, format.program_of(folder)), folder)
    return list(newest.values())


def find(name: str) -> Path:
    """Find a snapshot by name, whole or given, or a model's only one. Raises SnapshotMissingError."""
    root = str(paths.snapshots_dir())
    all_of = format.generations(root) | format.generations(root, fingerprint.program_tag())
    found = format.named(all_of, name) or [
        key for key in all_of if format.model_part(key) == format.part_of(name)
    ]
    if len(found) == 1:
        return Path(all_of[found[0]][0])
    if found:
        raise SnapshotMissingError(
            f"{name} names several snapshots", hint=f"name one: {', '.join(sorted(found))}"
        )
    raise SnapshotMissingError(
        f"there is no snapshot called {name}",
        hint="`edgeinfer snapshots list` shows them; `edgeinfer warm MODEL` builds one",
    )
