"""The disk limit of the prefix cache, and its eviction: the least recently used blocks first.

    ROOT/used   int64 words: the bytes of all blocks when they were last counted, then of each written
                since. Listing 100,000 files takes 2 to 3 s, so blocks are counted again only after a
                part of the limit was written, or when the limit seems reached. Until then,
                blocks that were deleted otherwise stay in the sum.

A block's last use is its file's mtime, set when it is written and whenever it is read. Parents are
stamped later than their children, so that leaves go first. Times in the future (a clock that was set
back) count as now. Prefixes that the sessions of an agent share go last:

    FOLDER/kept/AGENT[.SALT]   the number of recorded sessions; names of the blocks that all share;
                               after an empty line the names of blocks after them, inside which the
                               sessions diverge

One session does not show where the agent's instructions and tools end and the user's text begins. So a
shared prefix is known, and retained, from the second session on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.platform.disk import free_bytes, new_file, open_private
from edgeinfer.runtime.kv_cache import common_prefix

SUFFIX = ".block"
_USED = "used"
#: Divisor for the default limit: a quarter of the free space plus the blocks.
_SHARE_OF_FREE = 4
_MOST_BYTES = 64 << 30
#: Space (bytes) that stays free on the disk.
MARGIN_BYTES = 512 << 20
#: Share of the limit at which pruning stops, so that it is not needed again soon.
_PRUNE_TO = 0.9
#: Blocks are counted again after 1/32 of the limit was written.
_RECOUNT_SHARE = 32
#: Age (s) at which unfinished files, and lists of deleted blocks, are removed.
_STALE_S = 3600.0


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """`max_bytes` limits all blocks; 0 means a quarter of the free space. `margin_bytes` stays free."""

    max_bytes: int = 0
    margin_bytes: int = MARGIN_BYTES

    def allowed_bytes(self, root: Path, used_bytes: int) -> int:
        """Return how many bytes all blocks below `root` may have now. Raises OSError."""
        free = free_bytes(root)
        by_disk = max(0, used_bytes + free - self.margin_bytes)
        limit = self.max_bytes or min(_MOST_BYTES, (used_bytes + free) // _SHARE_OF_FREE)
        return min(limit, by_disk)


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A block's file below the root, with the data of a listing."""

    path: Path
    n_bytes: int
    used_ns: int


def list_blocks(root: Path) -> list[ListedBlock]:
    """List every block below `root`, least recently used first. Removes files of killed writers."""
    now_ns = time.time_ns()
    blocks = []
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            try:
                info = path.lstat()
            except FileNotFoundError:
                continue
            if name.endswith(SUFFIX):
                if info.st_mtime_ns > now_ns:
                    with contextlib.suppress(OSError):
                        os.utime(path, ns=(now_ns, now_ns))
                used_ns = min(info.st_mtime_ns, now_ns)
                blocks.append(ListedBlock(path, info.st_blocks * 512, used_ns))
            elif name.endswith(".new") and abs(now_ns - info.st_mtime_ns) > _STALE_S * 1e9:
                path.unlink(missing_ok=True)
    return sorted(blocks, key=lambda block: block.used_ns)


def reserve(root: Path, limits: CacheLimits, n_bytes: int) -> tuple[int, bool]:
    """Reserve `n_bytes` for a new block; return the number of evicted blocks, and whether it fits.

    Raises OSError.
    """
    used, written = _read_used(root)
    allowed, n_evicted = limits.allowed_bytes(root, used), 0
    if written + n_bytes > allowed // _RECOUNT_SHARE or used + n_bytes > allowed:
        n_evicted, used = prune(root, limits, n_bytes)
        with new_file(root / _USED, 0o600) as file:
            file.write(struct.pack("q", used))
        if used + n_bytes > limits.allowed_bytes(root, used):
            return n_evicted, False
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(root / _USED, flags), "wb", buffering=0) as file:
        file.write(struct.pack("q", n_bytes))
    return n_evicted, True


def _read_used(root: Path) -> tuple[int, int]:
    """Return the bytes of all blocks, and of those since the last count; too many if there was none."""
    try:
        with open(open_private(root / _USED), "rb") as file:
            counted, *written = array("q", file.read())
        return counted + sum(written), sum(written)
    except (OSError, ValueError):
        return 0, sys.maxsize


def forget_total(root: Path) -> None:
    """Discard the stored total, so that the next write counts all blocks again."""
    (root / _USED).unlink(missing_ok=True)


def prune(root: Path, limits: CacheLimits, extra_bytes: int = 0) -> tuple[int, int]:
    """Evict the least recently used blocks until `extra_bytes` fit. Raises OSError.

    Returns the number of evicted blocks, and the bytes of the others.
    """
    blocks = list_blocks(root)
    used = sum(block.n_bytes for block in blocks)
    allowed = limits.allowed_bytes(root, used)
    if used + extra_bytes <= allowed:
        return 0, used
    n_evicted = 0
    retained = retained_names(root)
    for block in sorted(blocks, key=lambda block: block.path.name.removesuffix(SUFFIX) in retained):
        if used + extra_bytes <= allowed * _PRUNE_TO:
            break
        block.path.unlink(missing_ok=True)
        used -= block.n_bytes
        n_evicted += 1
    names_left = {block.path.name.removesuffix(SUFFIX) for block in blocks if block.path.exists()}
    for owner in (root / "owners").glob("*"):
        is_old = time.time() - owner.stat().st_mtime > _STALE_S  # a new list names unwritten blocks
        if is_old and not owned_names(owner) & names_left:
            owner.unlink(missing_ok=True)
    return n_evicted, used


def owned_names(owner: Path) -> set[str]:
    """Read the list of a conversation's blocks; empty if it is missing or belongs to another user."""
    try:
        with open(open_private(owner), encoding="ascii") as file:
            return set(file.read().split())
    except (OSError, ValueError):
        return set()


_FOLDER = "kept"
#: An agent's name is the name of a file, with a digest of the salt: other salts share no block.
_AGENT = re.compile(r"[a-z0-9-]{1,32}")
_FILE = re.compile(r"[a-z0-9-]{1,32}(\.[0-9a-f]{16})?")
#: Least share of the recorded prefix in a session. With less it is a new version of the agent, and
#: recording restarts.
_SAME_SHARE = 0.5
#: Number of sessions that prove a shared prefix.
_MIN_SESSIONS = 2
#: Most recorded blocks after the shared prefix.
_MAX_FOLLOWING = 8


@dataclass(frozen=True, slots=True)
class _AgentRecord:
    """Names of the blocks that an agent's sessions share, in order, and of blocks `following` them.

    The latest of `following` comes first.
    """

    n_sessions: int = 0
    shared: tuple[str, ...] = ()
    following: tuple[str, ...] = ()


def record_session(folder: Path, agent: str, names: Sequence[str], salt: str = "") -> None:
    """Record that a session of `agent` begins with the blocks of these names. Raises OSError."""
    if not names or not _AGENT.fullmatch(agent):
        return
    path = _path(folder, agent, salt)
    before = _read(path)
    after = _add_session(before, tuple(names))
    if after != before:
        _write(path, after)


def record_fork(folder: Path, parent: str, name: str, *, is_tail: bool = False) -> None:
    """Record that a block follows `parent`, if an agent's shared prefix ends there.

    A partial block also counts after the last recorded one, because a working directory may be named at
    a block's end. Raises OSError.
    """
    for path, agent in _read_all(folder):
        ends = agent.shared[-1:] + (agent.following[:1] if is_tail else ())
        if agent.n_sessions >= _MIN_SESSIONS and parent in ends and agent.following[:1] != (name,):
            following = (name, *(other for other in agent.following if other != name))
            _write(path, _AgentRecord(agent.n_sessions, agent.shared, following[:_MAX_FOLLOWING]))


def retained_names(root: Path) -> set[str]:
    """List all blocks below `root` that at least two sessions of an agent share."""
    agents = map(_read, root.glob(f"*/*/{_FOLDER}/*"))
    return {name for agent in agents if agent.n_sessions >= _MIN_SESSIONS for name in agent.shared}


def agent_blocks(folder: Path, agent: str, salt: str = "") -> tuple[str, ...]:
    """List the blocks that sessions of `agent` share, in order, then later ones, latest first."""
    if not _AGENT.fullmatch(agent):
        return ()
    record = _read(_path(folder, agent, salt))
    return record.shared + record.following


def boundary_blocks(folder: Path, parent: str) -> tuple[str, ...]:
    """List the blocks after `parent` in which sessions diverge, if it is their last shared one."""
    agents = (agent for _, agent in _read_all(folder))
    return next((agent.following for agent in agents if agent.shared[-1:] == (parent,)), ())


def _path(folder: Path, agent: str, salt: str) -> Path:
    digest = hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()
    return folder / _FOLDER / (f"{agent}.{digest}" if salt else agent)


def _read_all(folder: Path) -> Iterator[tuple[Path, _AgentRecord]]:
    try:
        files = os.listdir(folder / _FOLDER)
    except OSError:
        return
    for name in files:
        if _FILE.fullmatch(name):
            path = folder / _FOLDER / name
            yield path, _read(path)


def _add_session(agent: _AgentRecord, names: tuple[str, ...]) -> _AgentRecord:
    n = common_prefix(agent.shared, names)
    if not n or n < _SAME_SHARE * len(agent.shared):
        return _AgentRecord(1, names)
    following = agent.following if n == len(agent.shared) else agent.shared[n : n + 1]
    return _AgentRecord(_MIN_SESSIONS, names[:n], following)


def _read(path: Path) -> _AgentRecord:
    try:
        with open(open_private(path), encoding="ascii") as file:
            head, _, following = file.read().partition("\n\n")
        first, *names = head.split("\n")
        bytes.fromhex("".join([*names, *following.split()]))  # raises ValueError for an invalid name
        return _AgentRecord(int(first), tuple(names), tuple(following.split()))
    except (OSError, ValueError):
        return _AgentRecord()


def _write(path: Path, agent: _AgentRecord) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = "\n".join([str(agent.n_sessions), *agent.shared]) + "\n\n" + "\n".join(agent.following)
    with new_file(path, 0o600) as file:
        file.write(text.encode("ascii"))
