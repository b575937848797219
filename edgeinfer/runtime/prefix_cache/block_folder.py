"""The prefix cache of one user: a folder of immutable files, shared by every process without a lock.

    ROOT/secret                      the key with which names are hashed (0600)
    ROOT/used                        the total size of all blocks (retention.py)
    ROOT/owners/HASH                 names of the blocks of one conversation
    ROOT/MODEL/answers/NAME          past answers, from which tokens are drafted (past_answers.py)
    ROOT/MODEL/IDENTITY/checked      the result of the round-trip check: "exact", or what failed
    ROOT/MODEL/IDENTITY/kept/AGENT   names of the blocks that an agent's sessions share (retention.py)
    ROOT/MODEL/IDENTITY/NAME.block   a block (kv_block.py)

IDENTITY is a hash of all settings that change the contents of KV cells. A complete block is renamed
into place and never changes; every process would write the same bytes. Files that another user may
access are refused. Blocks contain private text, so they are never part of a snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np

from edgeinfer.errors import BlockDamagedError, SnapshotUnsafeError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import new_file, open_private
from edgeinfer.runtime.kv_cache import AdapterKey, common_prefix
from edgeinfer.runtime.prefix_cache import kv_block, retention
from edgeinfer.runtime.prefix_cache.kv_block import (
    BLOCK_TOKENS,
    TAIL_KEY_TOKENS,
    TAIL_KEYS_TOKENS,
    BlockNames,
    Header,
    KvBlock,
    model_folder,
    owner_name,
    read_secret,
    unpack_tokens,
)
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.sampling.past_answers import PastAnswers
from edgeinfer.runtime.sequence_state import MappedFile

_log = logging.getLogger("edgeinfer.blocks")
#: Number of threads that read and verify files. Each thread reads about 4 GB/s.
_N_READERS = 2
#: How long (s) writing is paused after the disk was full.
_FULL_DISK_PAUSE_S = 60.0
#: Maximum bytes of blocks that may wait to be written. If none waits, a larger block is accepted.
_MAX_QUEUED_BYTES = 256 << 20
#: How long (s) `clear` waits for pending writes before it deletes all blocks.
_CLEAR_TIMEOUT_S = 10.0


#: Name of a block, and how many of its first tokens equal the prompt's; (b"", 0) if there is no block.
Match = tuple[bytes, int]


@dataclass(slots=True)
class Traffic:
    """Bytes written and read, and blocks evicted (`pruned`) or damaged, since the store was opened."""

    bytes_written: int = 0
    bytes_read: int = 0
    pruned: int = 0
    damaged: int = 0


class BlockStore:
    """The on-disk prefix cache of one user, below the folder `root`.

    `warn` is called at most once, with the reason for which writing is paused.

    Raises OSError, or SnapshotUnsafeError if another user may access the folder.
    """

    def __init__(
        self,
        root: Path,
        limits: CacheLimits | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.root = paths.private_dir(root)
        self._limits = limits or CacheLimits()
        self._warn = warn
        self.secret = read_secret(root / "secret")
        self._full_until = 0.0
        self._is_warned = False
        self._lock = threading.Lock()
        self.traffic = Traffic()

    def open_folder(
        self, model: str, identity: dict[str, str], block_tokens: int = BLOCK_TOKENS
    ) -> BlockFolder:
        """Open the blocks of one model with one set of settings.

        `model` is the result of `model_key`; `identity` has all settings that change KV cells.
        """
        raw = msgspec.json.encode(sorted({**identity, "model": model}.items()))
        digest = hashlib.blake2b(raw, digest_size=16)
        folder = paths.private_dir(self.root / model_folder(model)) / digest.hexdigest()
        names = BlockNames(self.secret, digest.digest(), block_tokens)
        return BlockFolder(self, paths.private_dir(folder), names)

    def reserve(self, n_bytes: int) -> bool:
        """Evict blocks until `n_bytes` fit; return False if that is impossible. Raises OSError."""
        if self.is_full:
            return False
        with self._lock:
            n_evicted, fits = retention.reserve(self.root, self._limits, n_bytes)
            self.traffic.pruned += n_evicted
            if not fits:
                self.stop_writing("the disk has no space for the prefix cache")
            return fits

    @property
    def is_full(self) -> bool:
        """Return whether writing is paused because the disk was full or failed."""
        return time.monotonic() < self._full_until

    def stop_writing(self, reason: str) -> None:
        """Pause writing for a minute; call `warn` the first time."""
        self._full_until = time.monotonic() + _FULL_DISK_PAUSE_S
        if not self._is_warned:
            self._is_warned = True
            self._warn(f"{reason}: prompts will be prefilled again after a restart")

    def add_owner(self, conversation: str, names: Sequence[bytes]) -> None:
        """Add block names to the list of blocks that are deleted with a conversation.

        Raises OSError, SnapshotUnsafeError.
        """
        self.make_root()
        paths.private_dir(self.root / "owners")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(self._owner_list(conversation), flags, 0o600), "wb") as file:
            file.write(b"".join(name.hex().encode() + b"\n" for name in names))

    def has_owner(self, conversation: str) -> bool:
        return self._owner_list(conversation).exists()

    def _owner_list(self, conversation: str) -> Path:
        return self.root / "owners" / owner_name(self.secret, conversation)

    def make_root(self) -> None:
        """If the folder `root` was deleted, create it again with the same secret.

        Raises SnapshotUnsafeError, OSError (ESTALE if another process created it, with a new secret).
        """
        paths.private_dir(self.root)
        if read_secret(self.root / "secret", self.secret) != self.secret:
            raise OSError(errno.ESTALE, "the folder was deleted, and another process created it again")


class WriterThread:
    """Runs jobs in order on a separate thread. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def _has_room(self) -> bool:
        return not self._bytes or self._bytes < _MAX_QUEUED_BYTES

    @property
    def is_idle(self) -> bool:
        """Return whether no job waits or runs."""
        return not (self._waiting or self._busy)

    def put(self, job: Callable[[], None], n_bytes: int = 0) -> bool:
        """Queue a job that holds `n_bytes` of memory until it is done.

        Returns False if the queued jobs hold too much memory. A job with `n_bytes` 0 is always queued.
        """
        with self._changed:
            if n_bytes and not self._has_room:
                return False
            self._waiting.append((job, n_bytes))
            self._bytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="edgeinfer-blocks", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait_for_room(self, timeout_s: float = 0.0) -> bool:
        """Wait until `put` would accept a job; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_room, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every job is done; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Finish the jobs and end the thread; after the timeout, drop the rest and return False."""
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        with self._changed:
            self._waiting.clear()
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _main(self) -> None:
        this_thread = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._thread is not this_thread)
                if not self._waiting:
                    return
                job, n_bytes = self._waiting.popleft()
                self._busy = True
            try:
                job()
            except Exception as error:  # noqa: BLE001  later jobs must still run
                _log.warning("a block was not written: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._busy = False
                    self._bytes -= n_bytes
                    self._changed.notify_all()


class BlockFolder:
    """Finds, reads and writes the blocks of one model with one set of settings. Thread-safe.

    The methods `find_…` read the headers of a few files. Their `parent` is the name of a prompt's last
    whole block, their `tokens` are the tokens of the prompt after that block. A `Match` is a block's
    name, and how many of its first tokens equal `tokens`.
    """

    def __init__(self, store: BlockStore, folder: Path, names: BlockNames) -> None:
        self._store = store
        self.traffic = store.traffic
        self._folder = folder
        self.names = names
        self.writer = WriterThread()
        self.answers = PastAnswers(folder.parent, store.secret)
        self._readers: ThreadPoolExecutor | None = None
        self._owned: dict[str, set[bytes]] = {}
        self._checked = ""

    def path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{retention.SUFFIX}"

    def has(self, name: bytes) -> bool:
        """Return whether a block's file exists. Only `read` verifies the file."""
        return self.path(name).exists()

    def header(self, name: bytes) -> Header | None:
        """Read a block's header without verifying the checksum; None if it cannot be read."""
        try:
            with open(open_private(self.path(name)), "rb") as file:
                start = file.read(1 << 16)
            return kv_block.read_header(start)
        except (OSError, BlockDamagedError):
            return None

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark existing blocks as used now; the first gets the latest time and is evicted last."""
        now_ns = time.time_ns()
        for i, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self.path(name), ns=(now_ns, now_ns - i))

    def find_tail(self, parent: bytes, tokens: list[int]) -> Match:
        """Return the longest `Match` among the partial blocks after `parent`."""
        return _longest(self._stored_tokens(self._tail_names(parent, tokens)), tokens)

    def find_superseded(self, parent: bytes, tokens: list[int], new_name: bytes) -> bytes | None:
        """Return the name of a partial block whose tokens are a prefix of `tokens`, None without one.

        The caller replaces that block by a block called `new_name` with all of `tokens`. If a block of
        the name `new_name` exists already, it is not returned.
        """
        blocks = self._stored_tokens(self._tail_names(parent, tokens))
        superseded = (name for name, stored in blocks if tokens[: len(stored)] == stored)
        return next((name for name in superseded if name != new_name), None)

    def _tail_names(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        lengths = (n for n in TAIL_KEYS_TOKENS if n <= len(tokens))
        return (self.names.tail(parent, tokens[:n]) for n in lengths)

    def find_checkpoint(self, parent: bytes, tokens: list[int]) -> Match:
        """Return the longest `Match` among the blocks that end at a checkpoint within `tokens`."""
        blocks = self._stored_tokens(self._checkpoint_names(parent, tokens))
        matches = [(name, len(stored)) for name, stored in blocks if tokens[: len(stored)] == stored]
        return max(matches, key=itemgetter(1), default=_NO_MATCH)

    def _checkpoint_names(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        if len(tokens) >= TAIL_KEY_TOKENS:
            yield self.names.tail(parent, tokens)
        for n in range(len(tokens), TAIL_KEY_TOKENS - 1, -TAIL_KEY_TOKENS):
            yield self.names.checkpoint(parent, tokens[:n])

    def find_boundary_block(self, parent: bytes, tokens: list[int]) -> Match:
        """Return the longest `Match` among the blocks that followed `parent` in an agent's sessions.

        Only the last block that an agent's sessions share has such followers.
        """
        names = map(bytes.fromhex, retention.boundary_blocks(self._folder, parent.hex()))
        return _longest(self._stored_tokens(names, parent), tokens)

    def agent_prefix(self, agent: str, adapters: AdapterKey, salt: str) -> list[int]:
        """Return the tokens that an agent's sessions share, then those of the latest session.

        Rows of pictures are negative pseudo-tokens. Returns [] if no block is stored for the `salt`.
        """
        following: dict[bytes, Header] = {}
        for name in map(bytes.fromhex, retention.agent_blocks(self._folder, agent, salt)):
            header = self.header(name)
            if header is not None:
                following.setdefault(header.parent, header)
        tokens: list[int] = []
        header = following.get(self.names.root(adapters, salt))
        while header is not None:
            tokens += unpack_tokens(header.tokens)
            header = following.get(header.name)
        return tokens

    def _stored_tokens(
        self, names: Iterable[bytes], parent: bytes | None = None
    ) -> Iterator[tuple[bytes, list[int]]]:
        """Yield names and tokens of the blocks that exist; with `parent`, only of its children."""
        for name in names:
            header = self.header(name)
            if header is not None and parent in (None, header.parent):
                yield name, unpack_tokens(header.tokens)

    @property
    def readers(self) -> ThreadPoolExecutor:
        """Threads for `read`. They start at the first use after `close`."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_N_READERS, "edgeinfer-read")
        return self._readers

    def read(self, name: bytes) -> KvBlock | None:
        """Map and verify a block. Return None if it is missing or damaged; a damaged one is deleted."""
        path = self.path(name)
        try:
            block = self._map(path)
            if block.header.name != name or block.header.identity != self.names.identity:
                raise BlockDamagedError(f"{path} contains another KV block than its name says")
        except OSError:
            return None
        except BlockDamagedError:
            self.traffic.damaged += 1
            path.unlink(missing_ok=True)
            return None
        self.traffic.bytes_read += block.n_bytes
        return block

    def _map(self, path: Path) -> KvBlock:
        file = MappedFile(open_private(path), 0)
        size = os.fstat(file.descriptor).st_size
        if not size:
            raise BlockDamagedError(f"the KV block {path} is an empty file")
        mapped = mmap.mmap(file.descriptor, size, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_WILLNEED)
        file.address = np.frombuffer(mapped, np.uint8).ctypes.data
        return kv_block.decode(memoryview(mapped), file)

    @property
    def can_write(self) -> bool:
        return not self._store.is_full

    def write(self, block: KvBlock) -> bool:
        """Queue a block for writing; return False if too many bytes are waiting."""
        return self.put(lambda: self._write(block), block.n_bytes)

    def add_owner(self, conversation: str, names: Sequence[bytes]) -> None:
        """Record that blocks belong to a conversation, whose deletion also deletes the blocks."""
        self.put(lambda: self._add_owner(conversation, names))

    def _add_owner(self, conversation: str, names: Sequence[bytes]) -> None:
        if not self._store.has_owner(conversation):  # a new conversation, or its blocks were deleted
            self._owned.pop(conversation, None)
        owned = self._owned.setdefault(conversation, set())
        new = [name for name in names if name not in owned]
        if new:
            self._store.add_owner(conversation, new)
            owned.update(new)

    def record_session(self, agent: str, names: Sequence[bytes], salt: str) -> None:
        """Record the blocks of a prompt of `agent`. Blocks that all sessions share are evicted last."""
        shared = [name.hex() for name in names]
        self.put(lambda: retention.record_session(self._folder, agent, shared, salt))

    def add_answer(self, salt: str, conversation: str, tokens: Sequence[int]) -> None:
        """Store an answer, so that tokens of later answers are drafted from it."""
        self.put(lambda: self.answers.add(salt, conversation, tokens))

    def put(self, work: Callable[[], None], n_bytes: int = 0) -> bool:
        """Queue `work` for the writer thread; return False if too many bytes are waiting."""
        return self.writer.put(lambda: self._try(work), n_bytes)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written; return False after the timeout."""
        return self.writer.flush(timeout_s)

    def _write(self, block: KvBlock) -> None:
        """Write a block's file if there is disk space. Runs on the writer thread."""
        if self._store.reserve(block.n_bytes):
            header = block.header
            self.traffic.bytes_written += kv_block.write(self.path(header.name), block)
            if header.kind in ("full", "tail"):
                parent, name = header.parent.hex(), header.name.hex()
                retention.record_following(self._folder, parent, name, is_tail=header.kind == "tail")

    def _try(self, work: Callable[[], None]) -> None:
        """Run `work`, again if the folder was missing and is now created. An error pauses writing."""
        try:
            try:
                work()
            except FileNotFoundError:
                self._store.make_root()
                paths.private_dir(self._folder.parent)
                paths.private_dir(self._folder)
                self._write_check()
                work()
        except (OSError, SnapshotUnsafeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.message
            self._store.stop_writing(f"the prefix cache cannot be written ({reason})")

    def remove(self, name: bytes) -> None:
        """Queue the deletion of a block."""
        self.put(lambda: self.path(name).unlink(missing_ok=True))

    def clear(self) -> None:
        """Delete all blocks of this folder, also those that wait to be written."""
        self.flush(_CLEAR_TIMEOUT_S)
        for block in retention.list_blocks(self._folder):
            block.path.unlink(missing_ok=True)

    def read_check(self) -> str:
        """Return the stored result of the round-trip check: "exact", what failed, "" if not stored."""
        self._checked = ""
        path = self._folder / "checked"
        with contextlib.suppress(OSError), open(open_private(path), encoding="utf-8") as file:
            self._checked = file.read()
        return self._checked

    def save_check(self, outcome: str) -> None:
        """Store the result of the round-trip check. If that fails, later processes check again."""
        self._checked = outcome
        self._try(self._write_check)

    def _write_check(self) -> None:
        if self._checked:
            with new_file(self._folder / "checked", 0o600) as file:
                file.write(self._checked.encode())

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write waiting blocks and end the threads; return False after the timeout.

        The folder can still be used: the next use starts new threads.
        """
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)
            self._readers = None
        is_written = self.writer.stop(timeout_s)
        self.answers.close()
        return is_written


_NO_MATCH: Match = (b"", 0)


def _longest(blocks: Iterable[tuple[bytes, list[int]]], tokens: list[int]) -> Match:
    matches = [(name, common_prefix(stored, tokens)) for name, stored in blocks]
    best = max(matches, key=itemgetter(1), default=_NO_MATCH)
    return best if best[1] else _NO_MATCH
