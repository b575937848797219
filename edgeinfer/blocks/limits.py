"""How much the blocks may take of the disk, and which go first: the least recently used.

Those that agents begin with go last of all (kept.py).

A block's time of last use is its file's mtime, set when it is written and whenever it is read. Parents
are always stamped later than their children, so that leaves go first. Times that lie in the future (a
clock that was set back) count as now.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.blocks.kept import kept_names
from edgeinfer.platform.disk import free_bytes, open_own

SUFFIX = ".block"
#: Without a limit of the user's, so much of what the disk has left, the blocks themselves included.
_SHARE_OF_FREE = 4
_MOST_BYTES = 64 << 30
#: Never written when the disk would have less than this left.
MARGIN_BYTES = 512 << 20
#: Pruning goes on to this share of the limit, so that it is not needed again at once.
_PRUNE_TO = 0.9
#: Unfinished files older than this (seconds), and lists of blocks that are gone, belong to nobody.
_STALE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_bytes`: for all blocks, 0 for a quarter of what is free. `margin_bytes` stays free."""

    max_bytes: int = 0
    margin_bytes: int = MARGIN_BYTES

    def allowed(self, root: Path, used_bytes: int) -> int:
        """Bytes that all blocks below `root` may have together now. Raises OSError."""
        free = free_bytes(root)
        by_disk = max(0, used_bytes + free - self.margin_bytes)
        wanted = self.max_bytes or min(_MOST_BYTES, (used_bytes + free) // _SHARE_OF_FREE)
        return min(wanted, by_disk)


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file below the root, as a listing shows it."""

    path: Path
    n_bytes: int
    used_ns: int


def list_blocks(root: Path) -> list[BlockFile]:
    """Every block below `root`, least recently used first. Removes what a killed writer left behind."""
    now_ns = time.time_ns()
    found = []
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            try:
                info = path.lstat()
            except FileNotFoundError:
                continue
            if name.endswith(SUFFIX):
                if info.st_mtime_ns > now_ns:
                    _stamp(path, now_ns)
                used_ns = min(info.st_mtime_ns, now_ns)
                found.append(BlockFile(path, info.st_blocks * 512, used_ns))
            elif name.endswith(".new") and abs(now_ns - info.st_mtime_ns) > _STALE_S * 1e9:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda block: block.used_ns)


def _stamp(path: Path, used_ns: int) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, ns=(used_ns, used_ns))


def prune(root: Path, limits: Limits, extra_bytes: int = 0) -> tuple[int, int]:
    """Remove the least recently used until `extra_bytes` fit: (removed, bytes left). Raises OSError."""
    blocks = list_blocks(root)
    used = sum(block.n_bytes for block in blocks)
    allowed = limits.allowed(root, used)
    if used + extra_bytes <= allowed:
        return 0, used
    removed = 0
    kept = kept_names(root)
    for block in sorted(blocks, key=lambda block: block.path.name.removesuffix(SUFFIX) in kept):
        if used + extra_bytes <= allowed * _PRUNE_TO:
            break
        block.path.unlink(missing_ok=True)
        used -= block.n_bytes
        removed += 1
    left = {block.path.name.removesuffix(SUFFIX) for block in blocks if block.path.exists()}
    for owner in (root / "owners").glob("*"):
        is_old = time.time() - owner.stat().st_mtime > _STALE_S  # a new one names blocks still to come
        if is_old and not owned_names(owner) & left:
            owner.unlink(missing_ok=True)
    return removed, used


def owned_names(owner: Path) -> set[str]:
    """Read the list of a conversation's blocks; nothing if it is missing or another user's."""
    try:
        with open(open_own(owner), encoding="ascii") as file:
            return set(file.read().split())
    except (OSError, ValueError):
        return set()
