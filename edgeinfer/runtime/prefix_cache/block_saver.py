"""Save sequences as KV blocks in the on-disk prefix cache: one block at a time, between steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from edgeinfer.errors import EngineError
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder
from edgeinfer.runtime.prefix_cache.kv_block import (
    TAIL_KEY_TOKENS,
    Chain,
    Header,
    Kind,
    KvBlock,
    pack_tokens,
)
from edgeinfer.runtime.prefix_cache.roundtrip_check import RoundtripCheck
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.sequence_state import State, as_state

#: Sequences that can be prefilled in less time (s) are not saved: writing a file costs as much.
_MIN_PREFILL_S = 0.05
#: Largest share of the time for saving blocks while sequences decode.
_WRITE_SHARE = 0.02
#: How long (s) an idle engine waits until the writer's queue accepts a block.
_WAIT_S = 0.05


class _Missing(NamedTuple):
    """A block with tokens [start, stop) that is not on disk, and the partial block it replaces."""

    header: Header
    start: int
    stop: int
    superseded: bytes | None = None


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """A sequence that waits to be saved. The first `n_done` blocks of `chain` are on disk or queued."""

    chain: Chain = field(default_factory=lambda: Chain([]))
    n_done: int = 0
    conversations: set[str] = field(default_factory=set)


class RoundtripVerdict:
    """Checks once whether blocks can be saved and restored without a changed bit; stores the result.

    `outcome` is "" before the check, "exact" if it succeeded, otherwise a text that says what failed.
    """

    def __init__(self, folder: BlockFolder, check: RoundtripCheck) -> None:
        self._folder, self._check = folder, check
        self.n_tokens = check.n_tokens
        self.outcome = folder.read_check()

    @property
    def is_refused(self) -> bool:
        return self.outcome not in ("", "exact")

    def step(self) -> None:
        """Run the next part of the check. If bits differ, delete all blocks.

        If the check cannot run (no memory), this process uses no blocks, and a later one checks again.
        """
        try:
            outcome = self._check.step()
        except EngineError as error:
            self.outcome = f"the round-trip check could not run: {error}"
            return
        if outcome is None:
            return
        self.outcome = outcome
        self._folder.save_check(outcome)
        if self.is_refused:
            self._folder.clear()


@dataclass(eq=False, kw_only=True)
class BlockSaver:
    """Saves the ended sequences of `kv` as blocks. Not thread-safe."""

    folder: BlockFolder
    states: SequenceStates
    kv: KvCache
    verdict: RoundtripVerdict
    #: True if the process is about to end: the round-trip check is left to a later process.
    is_exiting: bool = False

    def __post_init__(self) -> None:
        self._pending: dict[CachedSequence, _PendingWrite] = {}
        self._queued: set[bytes] = set()
        self._paused_until = 0.0
        self._was_used = False
        self.kv.before_drop = self._before_drop

    def detach(self) -> None:
        """Save no more sequences, so that `kv` can have another saver."""
        self.kv.before_drop = lambda cached_seq: None

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self._wants_check

    @property
    def _wants_check(self) -> bool:
        return self._was_used and not self.verdict.outcome and not self.is_exiting

    def add(self, cached_seq: CachedSequence, s_per_token: float) -> None:
        """Queue a sequence for saving, unless prefill, at `s_per_token`, would take under 50 ms."""
        n = len(cached_seq.tokens)
        if self.verdict.is_refused or not cached_seq.is_storable or n < TAIL_KEY_TOKENS:
            return
        if n * s_per_token < _MIN_PREFILL_S:
            return
        pending = self._pending.get(cached_seq)
        if pending is None:
            if self.folder.writer.is_idle:
                self._queued.clear()  # blocks that were written may have been deleted since
            pending = self._pending[cached_seq] = _PendingWrite()
            cached_seq.n_unchanged = 0
            self._was_used = True
        if cached_seq.conversation:
            pending.conversations.add(cached_seq.conversation)

    def would_store(self, cached_seq: CachedSequence) -> bool:
        """Return whether all tokens of a sequence are on disk, or will be if it is dropped now."""
        if not cached_seq.is_storable or cached_seq.memory_only_from is not None:
            return False
        return cached_seq not in self._pending or self.folder.writer.wait_for_room()

    def step(self, *, is_idle: bool) -> None:
        """Save one block, or run a part of the round-trip check.

        While requests run, saving takes at most 2 % of the time, and the check waits. Blocks are saved
        before the check, but used only after the check; if the check fails, they are deleted.
        """
        if is_idle and self._wants_check:
            self.verdict.step()
            return
        if not self._pending or (not is_idle and time.monotonic() < self._paused_until):
            return
        if not self.folder.writer.wait_for_room(_WAIT_S if is_idle else 0.0):
            return
        if self.verdict.is_refused or not self.folder.can_write:
            self._pending.clear()
            return
        began = time.monotonic()
        cached_seq = next(iter(self._pending))
        if not self._write_missing(cached_seq, self._pending[cached_seq]):
            del self._pending[cached_seq]
        took_s = time.monotonic() - began
        self._paused_until = began + took_s / _WRITE_SHARE

    def _before_drop(self, cached_seq: CachedSequence) -> None:
        pending = self._pending.pop(cached_seq, None)
        if pending is None:
            return
        while self.folder.can_write and self.folder.writer.wait_for_room():
            if not self._write_missing(cached_seq, pending):
                break

    def _write_missing(self, cached_seq: CachedSequence, pending: _PendingWrite) -> bool:
        """Save a sequence's first block that is not on disk; return False if nothing was saved."""
        if self.verdict.is_refused or not cached_seq.is_storable:
            return False
        if cached_seq not in self.kv.cached_sequences:  # the sequence was dropped
            return False
        missing = next(self._missing(cached_seq, pending), None)
        if missing is None:
            self._record_owners(cached_seq, pending)
            return False
        header = missing.header
        self._queued.add(header.name + header.tokens)
        states = self._save_states(cached_seq, missing)
        if states is None:
            return False
        # record owners first, so that a killed process leaves no block without an owner
        for conversation in pending.conversations:
            self.folder.add_owner(conversation, [header.name])
        self.folder.write(KvBlock(header, states))
        if missing.superseded is not None:
            self.folder.remove(missing.superseded)
        return True

    def _save_states(self, cached_seq: CachedSequence, block: _Missing) -> tuple[State, ...] | None:
        """Return the states of a `KvBlock`; None if the state or the checkpoint cannot be saved."""
        start, stop = block.start, block.stop
        positions = (cached_seq.tokens.position(start), cached_seq.tokens.position(stop))
        state = self.states.save(cached_seq.seq_id, start, stop, self.kv.pinned_cells, positions)
        if state is None or self.kv.checkpoints is None or block.header.kind == "full":
            return None if state is None else (state,)
        checkpoint = next((c for c in cached_seq.checkpoints if c.n_tokens == stop), None)
        return None if checkpoint is None else (state, as_state(checkpoint.state))

    def _missing(self, cached_seq: CachedSequence, pending: _PendingWrite) -> Iterator[_Missing]:
        tokens = _writable(cached_seq)
        self._extend_chain(cached_seq, tokens, pending)
        yield from self._missing_whole(tokens, pending)
        if cached_seq.in_use:
            return
        if self.kv.supports_truncation:
            yield from self._missing_tail(tokens, pending.chain)
        else:
            yield from self._missing_checkpoints(cached_seq, tokens, pending.chain)

    def _extend_chain(
        self, cached_seq: CachedSequence, tokens: PromptTokens, pending: _PendingWrite
    ) -> None:
        """Remove the names of blocks whose tokens have changed; append the names of new blocks."""
        names = self.folder.names
        if not pending.chain.names:
            pending.chain.names.append(names.root(cached_seq.adapters, cached_seq.salt))
        n_same = pending.chain.index_at(cached_seq.n_unchanged)
        del pending.chain.names[n_same + 1 :], pending.chain.ends[n_same + 1 :]
        pending.n_done = min(pending.n_done, n_same)
        names.extend(pending.chain, tokens)
        cached_seq.n_unchanged = len(cached_seq.tokens)

    def _missing_whole(self, tokens: list[int], pending: _PendingWrite) -> Iterator[_Missing]:
        names, ends = pending.chain.names, pending.chain.ends
        for i in range(pending.n_done, len(names) - 1):
            pending.n_done = i + 1
            if self.folder.has(names[i + 1]):
                continue
            block_tokens = tokens[ends[i] : ends[i + 1]]
            header = self._header("full", names[i + 1], names[i], block_tokens)
            if not self._is_queued(header):
                superseded = self.folder.find_superseded(names[i], block_tokens, header.name)
                yield _Missing(header, ends[i], ends[i + 1], superseded)

    def _missing_tail(self, tokens: list[int], chain: Chain) -> Iterator[_Missing]:
        start, parent = chain.ends[-1], chain.names[-1]
        tail_tokens = tokens[start:]
        if not tail_tokens:
            return
        _, n = self.folder.find_tail(parent, tail_tokens)
        header = self._header("tail", self.folder.names.tail(parent, tail_tokens), parent, tail_tokens)
        if n < len(tail_tokens) and not self._is_queued(header):
            superseded = self.folder.find_superseded(parent, tail_tokens, header.name)
            yield _Missing(header, start, len(tokens), superseded)

    def _missing_checkpoints(
        self, cached_seq: CachedSequence, tokens: list[int], chain: Chain
    ) -> Iterator[_Missing]:
        names = self.folder.names
        blocks: dict[bytes, _Missing] = {}
        for n_tokens in sorted(c.n_tokens for c in cached_seq.checkpoints if c.n_tokens <= len(tokens)):
            # a checkpoint after a picture may be the end of a whole block: use that block's parent
            ends_with_picture = tokens[n_tokens - 1] < 0
            i = chain.index_at(n_tokens - ends_with_picture)
            start, parent = chain.ends[i], chain.names[i]
            partial = tokens[start:n_tokens]
            if len(partial) < TAIL_KEY_TOKENS:
                continue
            is_tail = n_tokens == len(tokens)
            name = names.tail(parent, partial) if is_tail else names.checkpoint(parent, partial)
            header = self._header("tail" if is_tail else "point", name, parent, partial)
            blocks[name] = _Missing(header, start, n_tokens)
        for block in blocks.values():
            if self._is_queued(block.header):
                continue
            stored = self.folder.header(block.header.name)
            if stored is None or stored.tokens != block.header.tokens:
                yield block

    def _header(self, kind: Kind, name: bytes, parent: bytes, tokens: list[int]) -> Header:
        return Header(kind, name, parent, self.folder.names.identity, pack_tokens(tokens), ())

    def _is_queued(self, header: Header) -> bool:
        return header.name + header.tokens in self._queued

    def _record_owners(self, cached_seq: CachedSequence, pending: _PendingWrite) -> None:
        """Record that all blocks of a sequence were used now, and by which conversations."""
        names, conversations = pending.chain.names, pending.conversations
        tail_tokens = _writable(cached_seq)[pending.chain.ends[-1] :]

        def record() -> None:  # on the writer thread, after the tail block was written
            tail, n = self.folder.find_tail(names[-1], tail_tokens)
            used_names = [*names[1:], *([tail] if n else [])]
            self.folder.touch(used_names)
            for conversation in conversations:
                self.folder.add_owner(conversation, used_names)

        self.folder.put(record)


def _writable(cached_seq: CachedSequence) -> PromptTokens:
    tokens = PromptTokens(cached_seq.tokens[: cached_seq.memory_only_from])
    # leave out a picture (negative tokens) at the end, which may be computed only in part
    if tokens and tokens[-1] < 0:
        tokens.truncate(tokens.round_down(len(tokens) - 1))
    return tokens
