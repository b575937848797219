"""The disk limit of the prefix cache, which blocks are evicted first, and their deletion by the user.

    ROOT/used   int64 numbers: the size (bytes) of all blocks when they were last listed, then of each
                block written since. Listing 100,000 files takes 2 to 3 s, so that is done only after a
                part of the limit was written, or when the sum reaches the limit.

The least recently used blocks are evicted first. The last use is the file's mtime, which is set when
the block is written or read; a parent gets a later time than its children, so that it is evicted after
them. Times in the future (the clock was set back) count as now.

Blocks that the prompts of a coding agent have in common (its instructions and tools) are evicted last:

    FOLDER/kept/AGENT[.SALT]   number of sessions; names of the blocks that all sessions have in common;
                               after an empty line, names of the blocks that followed in some session

One session does not show where the common part ends, so blocks are retained after the second session.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes, new_file, open_private
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.prefix_cache.kv_block import model_folder, owner_name, read_secret
from edgeinfer.runtime.sampling.past_answers import forget_answers

SUFFIX = ".block"
_USED = "used"
#: The default limit is a quarter of the sum of the free space and the size of all blocks, but at most
#: 64 GiB.
_SHARE_OF_FREE = 4
_MOST_BYTES = 64 << 30
#: Free space (bytes) that the cache leaves on the disk.
MARGIN_BYTES = 512 << 20
#: Blocks are evicted down to this share of the limit, so that eviction is rare.
_PRUNE_TO = 0.9
#: The sizes of all blocks are read again each time that 1/32 of the limit has been written.
_RECOUNT_SHARE = 32
#: Age (s) at which two kinds of files are deleted: unfinished ones, and a conversation's list of blocks
#: if none of these blocks is left.
_STALE_S = 3600.0


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits on disk use. `max_bytes` 0 means a quarter of the free space, at most 64 GiB.

    `margin_bytes` of the disk always stay free.
    """

    max_bytes: int = 0
    margin_bytes: int = MARGIN_BYTES

    def allowed_bytes(self, root: Path, used_bytes: int) -> int:
        """Return the limit (bytes) on the total size of blocks, now `used_bytes`. Raises OSError."""
        free = free_bytes(root)
        by_disk = max(0, used_bytes + free - self.margin_bytes)
        limit = self.max_bytes or min(_MOST_BYTES, (used_bytes + free) // _SHARE_OF_FREE)
        return min(limit, by_disk)


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """The file of a block, its size on disk, and the time of its last use (ns)."""

    path: Path
    n_bytes: int
    used_ns: int


def list_blocks(root: Path) -> list[ListedBlock]:
    """List all blocks below `root`, least recently used first. Deletes old unfinished files."""
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
    """Evict blocks until `n_bytes` more fit, and count those bytes as used. Raises OSError.

    Returns the number of evicted blocks, and whether there is enough space.
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
    """Return the bytes of all blocks, and of those written since then; (0, sys.maxsize) if unknown."""
    try:
        with open(open_private(root / _USED), "rb") as file:
            counted, *written = array("q", file.read())
        return counted + sum(written), sum(written)
    except (OSError, ValueError):
        return 0, sys.maxsize


def prune(root: Path, limits: CacheLimits, extra_bytes: int = 0) -> tuple[int, int]:
    """Evict the least recently used blocks until `extra_bytes` more fit. Raises OSError.

    Returns the number of evicted blocks, and the total size (bytes) of the remaining ones.
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
        # the list of a new conversation may name blocks that are not written yet
        is_old = time.time() - owner.stat().st_mtime > _STALE_S
        if is_old and not owned_names(owner) & names_left:
            owner.unlink(missing_ok=True)
    return n_evicted, used


def owned_names(owner: Path) -> set[str]:
    """Return the names in a conversation's list `owner`; none if the file is missing or not private."""
    try:
        with open(open_private(owner), encoding="ascii") as file:
            return set(file.read().split())
    except (OSError, ValueError):
        return set()


def forget_all(root: Path) -> int:
    """Delete all files except the secret, which running processes use; return the freed bytes."""
    freed = sum(block.n_bytes for block in list_blocks(root))
    if root.is_dir():
        for folder in [path for path in root.iterdir() if path.is_dir()]:
            shutil.rmtree(folder, ignore_errors=True)
    (root / _USED).unlink(missing_ok=True)  # so that blocks are listed before the next write
    return freed


def forget_model(root: Path, model: str) -> int:
    """Delete the blocks of a model, given its `model_key`; return the freed bytes."""
    folder = root / model_folder(model)
    freed = sum(block.n_bytes for block in list_blocks(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return freed


def forget_conversations(root: Path, *conversations: str) -> int:
    """Delete the blocks and answers that only these conversations own; return the freed bytes."""
    if not (root / "secret").exists():
        return 0
    paths.private_dir(root)
    secret = read_secret(root / "secret")
    freed = forget_answers(root, secret, conversations)
    lists = [root / "owners" / owner_name(secret, conversation) for conversation in conversations]
    names = set().union(*map(owned_names, lists))
    if names:
        for other in set((root / "owners").glob("*")).difference(lists):
            names -= owned_names(other)
    for folder in root.glob("*/*/"):
        for name in filter(str.isalnum, names):
            path = folder / f"{name}{SUFFIX}"
            with contextlib.suppress(FileNotFoundError):
                n_bytes = path.lstat().st_blocks * 512
                path.unlink()
                freed += n_bytes
    for path in lists:
        path.unlink(missing_ok=True)
    return freed


_FOLDER = "kept"
#: Matches the name of an agent whose sessions are recorded, such as "claude-code".
_AGENT = re.compile(r"[a-z0-9-]{1,32}")
#: Matches the name of the file that records an agent's sessions: the agent's name, and a hash of the
#: cache salt if there is one.
_FILE = re.compile(r"[a-z0-9-]{1,32}(\.[0-9a-f]{16})?")
#: If a session begins with less than this share of the agent's recorded blocks, the agent is assumed to
#: be a new version, and its record begins again.
_SAME_SHARE = 0.5
#: Number of an agent's sessions after which the blocks that they share are retained.
_MIN_SESSIONS = 2
#: Maximum number of blocks that are recorded in addition to those that an agent's sessions share:
#: blocks that followed the last shared one.
_MAX_FOLLOWING = 8


@dataclass(frozen=True, slots=True)
class _AgentRecord:
    """Names of the blocks that all sessions share, and of blocks that followed, the latest first."""

    n_sessions: int = 0
    shared: tuple[str, ...] = ()
    following: tuple[str, ...] = ()


def record_session(folder: Path, agent: str, names: Sequence[str], salt: str = "") -> None:
    """Record the block names of a new prompt of `agent`. Raises OSError."""
    if not names or not _AGENT.fullmatch(agent):
        return
    path = _path(folder, agent, salt)
    before = _read(path)
    after = _add_session(before, tuple(names))
    if after != before:
        _write(path, after)


def record_following(folder: Path, parent: str, name: str, *, is_tail: bool = False) -> None:
    """Record the new block `name` if `parent` is the last block that an agent's sessions share.

    A partial block (`is_tail`) is also recorded after the block that was recorded last, because prompts
    may begin to differ at the very end of a block. Raises OSError.
    """
    for path, agent in _read_all(folder):
        ends = agent.shared[-1:] + (agent.following[:1] if is_tail else ())
        if agent.n_sessions >= _MIN_SESSIONS and parent in ends and agent.following[:1] != (name,):
            following = (name, *(other for other in agent.following if other != name))
            _write(path, _AgentRecord(agent.n_sessions, agent.shared, following[:_MAX_FOLLOWING]))


def retained_names(root: Path) -> set[str]:
    """Return the names of all blocks that at least two sessions of an agent have in common."""
    agents = map(_read, root.glob(f"*/*/{_FOLDER}/*"))
    return {name for agent in agents if agent.n_sessions >= _MIN_SESSIONS for name in agent.shared}


def agent_blocks(folder: Path, agent: str, salt: str = "") -> tuple[str, ...]:
    """Return the names of the blocks that an agent's sessions share, in the prompt's order.

    After them come the blocks that `record_following` has recorded, the latest first.
    """
    if not _AGENT.fullmatch(agent):
        return ()
    record = _read(_path(folder, agent, salt))
    return record.shared + record.following


def boundary_blocks(folder: Path, parent: str) -> tuple[str, ...]:
    """Return the names of blocks that followed `parent`, the last block that an agent's sessions share.

    The latest comes first. Returns () if `parent` is not the last shared block of an agent.
    """
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
        bytes.fromhex("".join([*names, *following.split()]))  # ValueError if a name is invalid
        return _AgentRecord(int(first), tuple(names), tuple(following.split()))
    except (OSError, ValueError):
        return _AgentRecord()


def _write(path: Path, agent: _AgentRecord) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = "\n".join([str(agent.n_sessions), *agent.shared]) + "\n\n" + "\n".join(agent.following)
    with new_file(path, 0o600) as file:
        file.write(text.encode("ascii"))
