"""Gives requests what earlier ones have computed, and keeps what they leave behind for later ones."""

from __future__ import annotations

import time

from edgeinfer.runtime.kv_cache import recurrent_checkpoints
from edgeinfer.runtime.kv_cache.cache import KvCache, closest, common_prefix, describe_divergence
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.prefix_cache.lookup import BlockCache, Restore
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.prefill_policy import Chunks
from edgeinfer.runtime.scheduler.sequence import Sequence

#: Blocks are put back for so long in a step (seconds) beside running streams, and when nobody runs.
_RESTORE_BESIDE_S = 0.02
_RESTORE_ALONE_S = 0.1
#: Fewer cells of idle conversations are passed over.
_IDLE_CELLS = 1024
#: A step that could only wait for the disk waits so long (seconds).
_DISK_WAIT_S = 0.02


def restoring(running: list[Sequence]) -> list[Sequence]:
    """Whose blocks are put back now: prompts that nobody waits for stand back for one that is."""
    beginning = [s for s in running if s.resident is not None and not s.is_decoding]
    is_awaited = any(not s.is_prefill_only for s in beginning)
    return [s for s in running if s.restore is not None and not (is_awaited and s.is_prefill_only)]


class Prefixes:
    """Hands prefixes over. `blocks` is the store's side, None without; `can_cut`: states, anywhere."""

    def __init__(
        self, kv: KvCache, chunks: Chunks, counters: Counters, vocab: Vocab, *, can_cut: bool
    ) -> None:
        self._kv = kv
        self._chunks = chunks
        self._counters = counters
        self._vocab, self._can_cut = vocab, can_cut
        self.blocks: BlockCache | None = None

    def in_memory(self, seq: Sequence) -> int:
        """How many of its tokens the cells hold already."""
        if not seq.request.cache_prompt:
            return 0
        n_top = seq.request.prompt_logprobs
        return self._kv.match(seq.tokens, seq.adapters, seq.request.cache_salt, n_top=n_top)[1]

    # taking over

    def take_over(self, seq: Sequence, *, is_alone: bool) -> None:
        """Give a request a cache sequence with what memory has of its prompt.

        What the store has beyond that begins to be read. Nothing where all sequence ids are in use.
        """
        request = seq.request
        if request.cache_prompt and not seq.clock.started:
            residents = self._kv.residents
            seq.closest = closest(residents, seq.tokens, seq.adapters, request.cache_salt)
        n_top = request.prompt_logprobs
        resident = self._kv.claim(
            seq.tokens, seq.adapters, request.cache_salt, reuse=request.cache_prompt, n_top=n_top
        )
        if resident is None:
            return
        seq.resident = resident
        resident.is_private = not request.cache_prompt
        kept = common_prefix(resident.tokens, seq.tokens[:-1])
        if n_top is not None:
            kept = min(kept, len(resident.logprobs))
            seq.prompt_logprobs = resident.logprobs[:kept]
        if not self._kv.truncate(resident, kept):
            kept = 0
            seq.prompt_logprobs = []
        if is_alone:
            self._make_way(seq, len(seq.tokens) - kept)
        if request.cache_prompt and self.blocks is not None and n_top is None:
            seq.restore = self.blocks.match(
                seq.tokens, seq.adapters, request.cache_salt, kept, is_alone=is_alone
            )
        if seq.restore is not None:
            self._kv.truncate(resident, seq.restore.start)
            seq.restore.cached = kept if self._can_cut else 0
        if not request.cache_on_disk:
            self._kv.keep_in_memory(resident)
        if seq.restore is None:
            self._begin(seq, kept)

    def _begin(self, seq: Sequence, from_memory: int) -> None:
        cached = seq.n_past
        from_disk = max(0, cached - from_memory)
        if not seq.clock.started:
            seq.clock.started = time.monotonic()
            seq.cached_tokens = cached
            seq.cached_disk_tokens = from_disk
            self._counters.prompt_tokens += seq.prompt_tokens
            self._counters.cached_tokens += cached
            self._counters.cached_disk_tokens += from_disk
            if seq.request.cache_prompt:
                seq.divergence = describe_divergence(
                    seq.tokens, seq.closest, cached, self._vocab.detokenize
                )
        seq.progress()

    def _make_way(self, seq: Sequence, n_new: int) -> None:
        """Drop idle conversations that the store has: attention would pass over their cells."""
        if self.blocks is None or not self._can_cut or n_new < self.blocks.block_tokens:
            return
        idle = [r for r in self._kv.residents if self.blocks.can_come_back(r)]
        if sum(len(r.cells) for r in idle) >= _IDLE_CELLS:
            for resident in idle:
                self._kv.drop(resident)

    def restore(self, running: list[Sequence]) -> None:
        """Put back blocks that have been read, for a while, so that running streams do not stall."""
        streams = any(s.is_decoding for s in running)
        until = time.monotonic() + (_RESTORE_BESIDE_S if streams else _RESTORE_ALONE_S)
        for seq in restoring(running):
            while seq.restore is not None and seq.restore.is_ready and time.monotonic() < until:
                self._restore_one(seq, seq.restore)
            block_s = self.blocks.block_tokens * self._chunks.s_per_token if self.blocks else 0.0
            if seq.restore is not None and seq.restore.is_too_slow(block_s):
                self._end_restore(seq)

    def _restore_one(self, seq: Sequence, restore: Restore) -> None:
        assert self.blocks is not None
        assert seq.resident is not None
        goes_on = self.blocks.read(restore, seq.resident, seq.tokens)
        if restore.is_over or not goes_on:
            restore.has_ended_well = goes_on
            self._end_restore(seq)

    def _end_restore(self, seq: Sequence) -> None:
        if seq.restore is None:
            return
        restore, seq.restore = seq.restore, None
        restore.cancel()
        if self.blocks is not None and seq.resident is not None and not restore.has_ended_well:
            self.blocks.drop_unfinished(seq.resident)
        self._begin(seq, restore.cached)

    def wait_for_disk(self, running: list[Sequence]) -> None:
        """Nothing can be computed now: wait for a block, if one is on its way."""
        for seq in restoring(running)[:1]:
            if seq.restore is not None:
                seq.restore.wait(_DISK_WAIT_S)

    def leave_store(self, running: list[Sequence]) -> BlockCache | None:
        """Use no store any more; return it, to be closed. What is not written yet is not written."""
        for seq in running:
            self._end_restore(seq)
        self._kv.before_drop = lambda resident: None
        blocks, self.blocks = self.blocks, None
        return blocks

    # leaving behind

    def take_point(self, seq: Sequence) -> None:
        """Note where a state that cannot be cut is, where a later request may want to go back to."""
        worth = seq.request.cache_prompt and recurrent_checkpoints.is_worth_a_point(
            seq.n_past, len(seq.tokens)
        )
        if worth and seq.resident is not None:
            self._kv.take_point(seq.resident)

    def give_up(self, seq: Sequence, *, keep: bool) -> None:
        """Take the cells of a request that is to go on later; what is not kept is computed again."""
        self._end_restore(seq)
        if seq.resident is not None:
            self._kv.release(seq.resident, keep=keep)
            seq.resident = None

    def leave_behind(self, seq: Sequence, *, keep: bool) -> None:
        """A request has ended: what it has computed is there for others, if `keep`."""
        self._end_restore(seq)
        if seq.resident is None:
            return
        resident, seq.resident = seq.resident, None
        resident.conversation = seq.request.conversation
        resident.is_read_ahead = seq.is_prefill_only
        if keep:
            self._kv.take_point(resident)
        self._kv.release(resident, keep=keep)
        if not seq.request.cache_on_disk:
            return
        resident.memory_only_from = None
        if keep and self.blocks is not None:
            self.blocks.writing.add(resident, self._chunks.s_per_token)
            self.blocks.keep_preamble(seq.request, seq.tokens, seq.adapters)
