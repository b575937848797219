"""Keep snapshots within their limits: the total, the disk's margin, one generation of each name."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.platform.disk import free_bytes
from edgeinfer.snapshots import fingerprint, format, registry

_GIB = 1 << 30


def remove(folder: Path) -> None:
    """Make the snapshot invisible at once, then delete it. Processes resumed from it go on."""
    (folder / format.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def drop_older(root: Path, name: str) -> None:
    """Remove all but the newest generation of a name that this program has built."""
    for folder in format.generations(str(root), fingerprint.program_tag()).get(name, [])[1:]:
        remove(Path(folder))


def by_last_use(root: Path, keep: str = "") -> list[Path]:
    """List all but our `keep`, by order of removal: orphans, unnamed ones, then the longest unused."""
    own = format.generations(str(root), fingerprint.program_tag()).get(keep, [])
    folders = [
        Path(f) for found in format.generations(str(root)).values() for f in found if f not in own
    ]
    return sorted(folders, key=_worth)


def _worth(folder: Path) -> tuple[bool, bool, float]:
    return not registry.is_orphan(folder), registry.is_named(folder), registry.last_used_s(folder)


def to_limit(root: Path, config: SnapshotsConfig, keep: str = "", extra_bytes: int = 0) -> list[str]:
    """Remove the least recently used until all and `extra_bytes` fit the limit; their names."""
    sizes = {folder: registry.disk_bytes(folder) for folder in by_last_use(root)}
    total, removed = sum(sizes.values()) + extra_bytes, []
    for folder in by_last_use(root, keep):
        if total <= config.max_total_gib * _GIB:
            break
        total -= sizes.get(folder, 0)
        removed.append(format.name_of(folder.name))
        remove(folder)
    return removed


def make_room(root: Path, need_bytes: int, config: SnapshotsConfig, keep: str = "") -> list[str]:
    """Remove the least recently used until `need_bytes` fit limit and disk; their names."""
    removed = to_limit(root, config, keep, need_bytes)
    for folder in by_last_use(root, keep):
        if free_bytes(root) - need_bytes >= config.disk_margin_gib * _GIB:
            break
        removed.append(format.name_of(folder.name))
        remove(folder)
    return removed


def stale(root: Path) -> list[str]:
    """Remove this program's refused snapshots and those whose program is gone; return their names."""
    removed = []
    for folder in by_last_use(root):
        if registry.is_orphan(folder) or (registry.is_own(folder) and not registry.state_of(folder)[0]):
            removed.append(format.name_of(folder.name))
            remove(folder)
    return removed
