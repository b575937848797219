"""The KV cache in memory: which tokens and cells each sequence has, prefix matches, and eviction.

llama.cpp's unified cache is used: all sequences share its cells, and copying a prefix to another
sequence id only sets a bit per cell. llama.cpp does not report free cells, so this module counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from edgeinfer.runtime.events import TokenLogprobs
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.recurrent_checkpoints import Checkpoint, Checkpoints

#: LoRA adapters of a sequence, sorted: the stamp of each file (path, size, mtime, inode) and the scale.
AdapterKey = tuple[tuple[str, float], ...]

_COMPARE_STRIDE = 64
#: While at least `_MANY_RUNNING` sequences run, idle sequences below `_SHORT_IDLE_TOKENS` tokens may
#: hold `_SHORT_IDLE_CELLS` cells in total: attention scans idle cells in every step, and a short
#: sequence is cheap to prefill again (decision 056).
_MANY_RUNNING = 3
_SHORT_IDLE_TOKENS = 192
_SHORT_IDLE_CELLS = 384


def common_prefix(a: Sequence[object], b: Sequence[object], start: int = 0) -> int:
    """Return the length of the common prefix of `a` and `b`, whose first `start` items are equal."""
    n = min(len(a), len(b))
    i = start
    while i + _COMPARE_STRIDE <= n and a[i : i + _COMPARE_STRIDE] == b[i : i + _COMPARE_STRIDE]:
        i += _COMPARE_STRIDE
    while i < n and a[i] == b[i]:
        i += 1
    return i


class SequenceMemory(Protocol):
    """The operations of llama.cpp's KV cache on its sequences."""

    def remove(self, seq_id: int, start: int, stop: int) -> bool:
        """Remove positions [start, stop), to the end if `stop` is -1; return False on failure."""

    def copy(self, source: int, target: int, stop: int) -> None:
        """Let `target` share positions [0, stop) of `source`."""

    def shift(self, seq_id: int, start: int, delta: int) -> None:
        """Add `delta` to the positions from `start` on."""

    def first_position(self, seq_id: int) -> int:
        """Return the first position that all layers still have, -1 if there is none.

        Layers with a sliding window drop early positions.
        """


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens and cells of one sequence id (llama-server: a slot). Sequences may share cells.

    - in_use: a request runs in this sequence. pinned: the system prompt, which is evicted last.
    - is_prefetched: the sequence was prefilled for an expected request.
    - salt: only requests with this cache salt may reuse the sequence, unless it is pinned. If
      `is_private`, no request may.
    - logprobs: `logprobs[i]` is for token `i + 1`, with `n_top` alternatives.
    - is_storable: False after a context shift, or a move from another context, because the rounding
      differs; then no token is stored on disk.
    - memory_only_from: index from which on tokens are not stored on disk; None if all may be.
    - n_unchanged: number of first tokens that have not changed since they were stored on disk.
    - conversation: the conversation whose deletion also deletes these tokens on disk.
    """

    seq_id: int
    adapters: AdapterKey
    salt: str = ""
    conversation: str = ""
    is_storable: bool = True
    n_unchanged: int = 0
    memory_only_from: int | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    tokens: PromptTokens = field(default_factory=PromptTokens)
    cells: list[int] = field(default_factory=list)
    in_use: bool = True
    pinned: bool = False
    is_private: bool = False
    is_prefetched: bool = False
    used_at: int = 0
    n_top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def is_reusable_with(self, adapters: AdapterKey, salt: str) -> bool:
        """Return whether a request with `adapters` and `salt` may reuse these tokens."""
        is_shared = self.pinned or self.salt == salt
        return is_shared and self.adapters == adapters and not self.is_private


class KvCache:
    """Tracks the use of `n_cells` cells and `n_seq_max` sequence ids by sequences. Not thread-safe.

    Recurrent and hybrid models have `checkpoints`; their sequences can be reused only whole or up to a
    checkpoint. `window` is the length of the sliding window (positions), 0 without one. `before_drop`
    is called with each cached sequence before it is dropped, so that it can be stored on disk.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        *,
        n_cells: int,
        n_seq_max: int,
        checkpoints: Checkpoints | None = None,
        window: int = 0,
    ) -> None:
        self._memory = memory
        self.n_cells = n_cells
        self.checkpoints = checkpoints
        self.supports_truncation = checkpoints is None
        self._window = window
        self.before_drop: Callable[[CachedSequence], None] = lambda cached_seq: None
        self._free_seq_ids = list(range(n_seq_max - 1, -1, -1))
        self._free_cells = list(range(n_cells - 1, -1, -1))
        self._ref_counts = [0] * n_cells  # per cell: number of sequences that use it
        self._clock = 0
        self.cached_sequences: list[CachedSequence] = []

    def resize(self, n_cells: int) -> None:
        """Renumber the used cells from 0 on, for a switch to a context with `n_cells` cells."""
        used = [cell for cell, n in enumerate(self._ref_counts) if n]
        new_cells = {cell: new_cell for new_cell, cell in enumerate(used)}
        for cached_seq in self.cached_sequences:
            cached_seq.cells = [new_cells[cell] for cell in cached_seq.cells]
        self._ref_counts = [self._ref_counts[cell] for cell in used] + [0] * (n_cells - len(used))
        self._free_cells = list(range(n_cells - 1, len(used) - 1, -1))
        self.n_cells = n_cells

    @property
    def pinned_cells(self) -> int:
        """Number of cells that pinned prompts use. They are the first cells of the cache."""
        return len({cell for c in self.cached_sequences if c.pinned for cell in c.cells})

    @property
    def used_cells(self) -> int:
        return self.n_cells - len(self._free_cells)

    @property
    def free_cells(self) -> int:
        return len(self._free_cells)

    def match(
        self, tokens: PromptTokens, adapters: AdapterKey, salt: str = "", *, n_top: int | None = None
    ) -> tuple[CachedSequence | None, int]:
        """Return the sequence with the longest reusable prefix and that prefix's length, or (None, 0).

        The last token of a prompt is never reused, because its logits are needed. `n_top` is not None
        if the request wants log-probabilities of the prompt, with that many alternatives per token.
        Then tokens are reused only as far as these log-probabilities are cached.
        """
        reusable = (c for c in self.cached_sequences if c.is_reusable_with(adapters, salt))
        matches = ((self._count_usable(c, tokens, n_top), not c.in_use, c) for c in reusable)
        n, _, longest = max(matches, key=itemgetter(0, 1), default=(0, True, None))
        return (longest, n) if n else (None, 0)

    def _count_usable(self, cached_seq: CachedSequence, tokens: PromptTokens, n_top: int | None) -> int:
        """Return how many of the first tokens of a cached sequence a prompt can reuse.

        Recurrent models reuse tokens up to a checkpoint. The result is 0 if layers with a sliding
        window have dropped cells that the next token attends to.
        """
        n = common_prefix(cached_seq.tokens, tokens)
        if n_top is not None:
            n_logprobs = len(cached_seq.logprobs) if cached_seq.n_top == n_top else 0
            n = min(n_logprobs, max(0, n - 1))
        n = tokens.round_down(min(n, len(tokens) - 1))
        if self.checkpoints is not None and n < len(cached_seq.tokens):
            checkpoint = self.checkpoints.latest_before(cached_seq.checkpoints, n)
            return checkpoint.n_tokens if checkpoint is not None else 0
        first_position = self._memory.first_position(cached_seq.seq_id) if self._window else 0
        return 0 if first_position > max(0, n - self._window) else n

    def allocate(
        self,
        tokens: PromptTokens,
        adapters: AdapterKey,
        salt: str = "",
        *,
        reuse: bool = True,
        n_top: int | None = None,
    ) -> CachedSequence | None:
        """Return a sequence, marked as in use, with the longest cached prefix of `tokens`.

        Idle sequences may be evicted for it. Returns None if requests use all sequence ids. Without
        `reuse`, the sequence is empty. `n_top` is explained at `match`.
        """
        source, n = self.match(tokens, adapters, salt, n_top=n_top) if reuse else (None, 0)
        if source is not None and not source.in_use and not source.pinned and n == len(source.tokens):
            source.in_use = True  # usually the next turn of the conversation: no copy is needed
            return source
        if not self._free_seq_ids and not self._evict_lru(except_for=source):
            if source is None or source.in_use or source.pinned or not self.truncate(source, n):
                return None
            source.in_use = True
            return source
        cached_seq = CachedSequence(self._free_seq_ids.pop(), adapters, salt)
        self.cached_sequences.append(cached_seq)
        if source is not None and n:
            self._copy_prefix(source, cached_seq, n)
        return cached_seq

    def _copy_prefix(self, source: CachedSequence, target: CachedSequence, n: int) -> None:
        end_position = -1 if n == len(source.tokens) else source.tokens.position(n)
        self._memory.copy(source.seq_id, target.seq_id, end_position)
        if self.checkpoints is not None and n < len(source.tokens):
            checkpoint = self.checkpoints.latest_before(source.checkpoints, n)
            if checkpoint is None or not self.checkpoints.restore(target.seq_id, checkpoint):
                self._memory.remove(target.seq_id, -1, -1)
                return
            self.checkpoints.add(target.checkpoints, checkpoint)
        target.is_storable = source.is_storable
        if source.memory_only_from is not None and source.memory_only_from < n:
            target.memory_only_from = source.memory_only_from
        target.n_top, target.logprobs = source.n_top, source.logprobs[:n]
        target.tokens.extend(source.tokens[:n])
        target.cells = source.cells[:n]
        for cell in target.cells:
            self._ref_counts[cell] += 1

    def record_computed(self, cached_seq: CachedSequence, tokens: Sequence[int]) -> None:
        """Record that llama.cpp has appended `tokens` to the sequence, each in a free cell."""
        for _ in tokens:
            cell = self._free_cells.pop()
            self._ref_counts[cell] = 1
            cached_seq.cells.append(cell)
        cached_seq.tokens.extend(tokens)

    def truncate(self, cached_seq: CachedSequence, n: int) -> bool:
        """Keep the first `n` tokens. If the model cannot do that, drop all tokens and return False."""
        if n == len(cached_seq.tokens):
            return True
        position = cached_seq.tokens.position(n)
        is_supported = self._restore_checkpoint(cached_seq, n) and self._memory.remove(
            cached_seq.seq_id, position, -1
        )
        if not is_supported:
            self._memory.remove(cached_seq.seq_id, -1, -1)
            n = 0
        self._release_cells(cached_seq.cells[n:])
        cached_seq.tokens.truncate(n)
        del cached_seq.cells[n:]
        cached_seq.n_unchanged = min(cached_seq.n_unchanged, n)
        cached_seq.logprobs = cached_seq.logprobs[: max(0, n - 1)]
        if cached_seq.memory_only_from is not None:
            cached_seq.memory_only_from = min(cached_seq.memory_only_from, n)
        if self.checkpoints is not None:
            self.checkpoints.drop_after(cached_seq.checkpoints, n)
        return is_supported

    def _restore_checkpoint(self, cached_seq: CachedSequence, n: int) -> bool:
        if self.checkpoints is None or not n:
            return True
        checkpoint = self.checkpoints.latest_before(cached_seq.checkpoints, n)
        if checkpoint is None or checkpoint.n_tokens != n:
            return False
        return self.checkpoints.restore(cached_seq.seq_id, checkpoint)

    def exclude_from_disk(self, cached_seq: CachedSequence) -> None:
        """Keep the tokens that are added from now on out of the on-disk prefix cache."""
        if cached_seq.memory_only_from is None:
            cached_seq.memory_only_from = len(cached_seq.tokens)

    def save_checkpoint(self, cached_seq: CachedSequence) -> None:
        """Save a checkpoint of the recurrent state after the present tokens."""
        if self.checkpoints is not None:
            self.checkpoints.save(cached_seq.checkpoints, cached_seq.seq_id, len(cached_seq.tokens))

    def remove_unrecorded_cells(self, cached_seq: CachedSequence) -> None:
        """Remove what an aborted step may have computed after the recorded tokens."""
        position = cached_seq.tokens.position(len(cached_seq.tokens))
        self._memory.remove(cached_seq.seq_id, position, -1)

    def clear_cells(self, cached_seq: CachedSequence) -> None:
        """Remove a sequence from llama.cpp's cache, but keep its cells reserved for the same tokens."""
        self._memory.remove(cached_seq.seq_id, -1, -1)

    def _release_cells(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._ref_counts[cell] -= 1
            if not self._ref_counts[cell]:
                self._free_cells.append(cell)

    def shift(self, cached_seq: CachedSequence, n_keep: int, n_discard: int) -> bool:
        """Discard `n_discard` tokens after the first `n_keep` (context shift).

        Returns False if the model does not support that, or another sequence shares cells whose
        positions would change.
        """
        is_shared = any(self._ref_counts[cell] > 1 for cell in cached_seq.cells[n_keep:])
        if is_shared or not self.supports_truncation:
            return False
        discarded = slice(n_keep, n_keep + n_discard)
        if not self._memory.remove(cached_seq.seq_id, discarded.start, discarded.stop):
            return False
        self._memory.shift(cached_seq.seq_id, discarded.stop, -n_discard)
        cached_seq.is_storable = False
        cached_seq.logprobs = []
        self._release_cells(cached_seq.cells[discarded])
        del cached_seq.cells[discarded]
        cached_seq.tokens.discard(n_keep, n_discard)
        cached_seq.n_unchanged = min(cached_seq.n_unchanged, n_keep)
        return True

    def release(self, cached_seq: CachedSequence, *, keep: bool) -> None:
        """End the use of a sequence; if `keep`, later requests may reuse its tokens."""
        self._clock += 1
        cached_seq.in_use, cached_seq.used_at = False, self._clock
        cached_seq.logprobs = cached_seq.logprobs[: max(0, len(cached_seq.tokens) - 1)]
        if not keep or not cached_seq.tokens:
            self._remove(cached_seq)
        self._limit_short_idle()

    def _limit_short_idle(self) -> None:
        if sum(c.in_use for c in self.cached_sequences) < _MANY_RUNNING:
            return
        idle = [
            c
            for c in self.cached_sequences
            if not (c.in_use or c.pinned) and len(c.tokens) < _SHORT_IDLE_TOKENS
        ]
        cells_left = _SHORT_IDLE_CELLS
        for cached_seq in sorted(idle, key=lambda c: -c.used_at):
            cells_left -= len(cached_seq.cells)
            if cells_left < 0:
                self.drop(cached_seq)

    def drop(self, cached_seq: CachedSequence) -> None:
        """Drop a cached sequence, and free the cells that no other sequence shares."""
        self.before_drop(cached_seq)
        self._remove(cached_seq)

    def _remove(self, cached_seq: CachedSequence) -> None:
        self._memory.remove(cached_seq.seq_id, -1, -1)
        self._release_cells(cached_seq.cells)
        if self.checkpoints is not None:
            self.checkpoints.drop_after(cached_seq.checkpoints)
        cached_seq.tokens, cached_seq.cells = PromptTokens(), []
        cached_seq.in_use = False
        self.cached_sequences.remove(cached_seq)
        self._free_seq_ids.append(cached_seq.seq_id)

    def drop_idle(self, *, include_pinned: bool = False) -> None:
        """Drop every sequence that no request uses; keep pinned ones, unless `include_pinned`."""
        for cached_seq in [
            c for c in self.cached_sequences if not c.in_use and (include_pinned or not c.pinned)
        ]:
            self.drop(cached_seq)

    def make_room(self, n: int) -> bool:
        """Evict idle sequences (LRU, pinned last) until `n` cells are free; return whether they are."""
        while len(self._free_cells) < n:
            if not self._evict_lru():
                return False
        return True

    def _evict_lru(self, except_for: CachedSequence | None = None) -> bool:
        idle = [c for c in self.cached_sequences if not c.in_use and c is not except_for]
        if not idle:
            return False
        self.drop(min(idle, key=lambda c: (c.pinned, c.used_at)))
        return True
