"""Acquire cached prefixes for requests, from memory and disk, and keep them for later requests."""

from __future__ import annotations

import time

from edgeinfer.runtime.kv_cache import KvCache, common_prefix, describe_divergence, find_longest_match
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.prefix_cache.cache import PrefixCache, Restore
from edgeinfer.runtime.prompt_tokens import text_only
from edgeinfer.runtime.recurrent_checkpoints import is_checkpoint_position
from edgeinfer.runtime.sampling.past_answers import CONTEXT_TOKENS
from edgeinfer.runtime.scheduler.prefill_policy import ChunkSizer
from edgeinfer.runtime.scheduler.sequence import Sequence

#: Time (s) for restoring blocks in a step with running streams, and without any.
_RESTORE_BESIDE_S = 0.02
_RESTORE_ALONE_S = 0.1
#: Least number of cells of idle sequences worth evicting.
_IDLE_CELLS = 1024
#: Shortest answer (tokens) that is stored for later drafts.
_WORTH_DRAFTING_TOKENS = 8
#: How long (s) a step waits for the disk if there is nothing else to do.
_DISK_WAIT_S = 0.02


def restoring(running: list[Sequence]) -> list[Sequence]:
    """List the sequences whose blocks are restored now; prefill-only ones yield to the others."""
    prefilling = [s for s in running if s.cached_seq is not None and not s.is_decoding]
    is_awaited = any(not s.is_prefill_only for s in prefilling)
    return [s for s in running if s.restore is not None and not (is_awaited and s.is_prefill_only)]


class Prefixes:
    """Give each sequence the longest cached prefix, from KV memory or disk.

    `prefix_cache`: the on-disk cache, or None.
    """

    def __init__(self, kv: KvCache, chunks: ChunkSizer, counters: Counters, vocab: Vocab) -> None:
        self._kv = kv
        self._chunks = chunks
        self._counters = counters
        self._vocab = vocab
        self.prefix_cache: PrefixCache | None = None

    @property
    def has_writes(self) -> bool:
        return self.prefix_cache is not None and self.prefix_cache.writer.has_work

    def write_blocks(self, *, is_idle: bool) -> None:
        """Store one pending block of an ended sequence, if this is the time for it."""
        if self.prefix_cache is not None:
            self.prefix_cache.writer.work(is_idle=is_idle)

    def saved_s(self, seq: Sequence) -> float:
        """Return about how long (s) prefill of its cached tokens would have taken; 0 if unknown."""
        return self._chunks.measured_s(seq.cached_tokens)

    def n_cached_in_memory(self, seq: Sequence) -> int:
        """Return how many of the sequence's tokens the KV cache holds."""
        if not seq.request.cache_prompt:
            return 0
        n_top = seq.request.prompt_logprobs
        return self._kv.match(seq.tokens, seq.adapters, seq.request.cache_salt, n_top=n_top)[1]

    def acquire(self, seq: Sequence, *, is_alone: bool) -> None:
        """Claim a sequence id with the longest prefix in memory, and start to read more blocks from
        disk. Without a free sequence id the request stays as it is.
        """
        request = seq.request
        if request.cache_prompt and not seq.clock.started:
            cached_sequences = self._kv.cached_sequences
            seq.closest = find_longest_match(
                cached_sequences, seq.tokens, seq.adapters, request.cache_salt
            )
        n_top = request.prompt_logprobs
        cached_seq = self._kv.claim(
            seq.tokens, seq.adapters, request.cache_salt, reuse=request.cache_prompt, n_top=n_top
        )
        if cached_seq is None:
            return
        seq.cached_seq = cached_seq
        cached_seq.is_private = not request.cache_prompt
        n_cached = seq.tokens.cut(common_prefix(cached_seq.tokens, seq.tokens[:-1]))
        if n_top is not None:
            n_cached = min(n_cached, len(cached_seq.logprobs))
            seq.prompt_logprobs = cached_seq.logprobs[:n_cached]
        if not self._kv.truncate(cached_seq, n_cached):
            n_cached = 0
            seq.prompt_logprobs = []
        if request.cache_prompt and request.speculative != "off" and self.prefix_cache is not None:
            seq.drafting.use_answers(self.prefix_cache.folder.answers.of(request.cache_salt))
        if is_alone:
            self._evict_idle(seq, len(seq.tokens) - n_cached)
        if request.cache_prompt and self.prefix_cache is not None and n_top is None:
            seq.restore = self.prefix_cache.match(
                seq.tokens, seq.adapters, request.cache_salt, n_cached, is_alone=is_alone
            )
        if seq.restore is not None:
            self._kv.truncate(cached_seq, seq.restore.start)
            seq.restore.cached = n_cached if self._kv.supports_truncation else 0
        if not request.cache_on_disk:
            self._kv.keep_in_memory(cached_seq)
        if seq.restore is None:
            self._begin(seq, n_cached)

    def _begin(self, seq: Sequence, from_memory: int) -> None:
        cached = seq.n_past
        from_disk = max(0, cached - from_memory)
        if not seq.clock.started:
            seq.clock.started = time.monotonic()
            seq.cached_tokens = cached
            seq.cached_disk_tokens = from_disk
            self._counters.prompt_tokens_total += seq.prompt_tokens
            self._counters.cached_tokens_total += cached
            self._counters.cached_disk_tokens_total += from_disk
            if seq.request.cache_prompt:
                seq.divergence = describe_divergence(
                    seq.tokens, seq.closest, cached, self._vocab.detokenize
                )
        seq.pictures.encode_after(cached)
        seq.progress()

    def _evict_idle(self, seq: Sequence, n_new: int) -> None:
        """Evict idle sequences before a large prefill if their blocks are on disk: attention scans
        every used cell, so idle ones slow each step.
        """
        cache = self.prefix_cache
        if cache is None or not self._kv.supports_truncation or n_new < cache.block_tokens:
            return
        idle = [c for c in self._kv.cached_sequences if cache.can_evict(c)]
        if sum(len(c.cells) for c in idle) >= _IDLE_CELLS:
            for cached_seq in idle:
                self._kv.drop(cached_seq)

    def restore(self, running: list[Sequence]) -> None:
        """Restore blocks that were read, for a bounded time, so that running streams do not stall."""
        if not any(seq.restore for seq in running):
            return
        streams = any(s.is_decoding for s in running)
        until = time.monotonic() + (_RESTORE_BESIDE_S if streams else _RESTORE_ALONE_S)
        for seq in restoring(running):
            while seq.restore is not None and seq.restore.is_ready and time.monotonic() < until:
                self._restore_one(seq, seq.restore)
            n_block = self.prefix_cache.block_tokens if self.prefix_cache else 0
            if seq.restore is not None and seq.restore.is_too_slow(n_block * self._chunks.s_per_token):
                self._end_restore(seq)

    def _restore_one(self, seq: Sequence, restore: Restore) -> None:
        assert self.prefix_cache is not None
        goes_on = self.prefix_cache.read(restore, seq.cached, seq.tokens)
        if restore.is_over or not goes_on:
            restore.succeeded = goes_on
            self._end_restore(seq)

    def _end_restore(self, seq: Sequence) -> None:
        if seq.restore is None:
            return
        restore, seq.restore = seq.restore, None
        restore.cancel()
        if self.prefix_cache is not None and seq.cached_seq is not None and not restore.succeeded:
            self.prefix_cache.drop_unfinished(seq.cached_seq)
        if seq.cached_seq is not None:
            self._kv.truncate(seq.cached_seq, seq.n_past_uncut)
        self._begin(seq, restore.cached)

    def wait_for_disk(self, running: list[Sequence]) -> None:
        """Wait for a block that is being read, if there is nothing to compute."""
        for seq in restoring(running)[:1]:
            if seq.restore is not None:
                seq.restore.wait(_DISK_WAIT_S)

    def detach_prefix_cache(self, running: list[Sequence]) -> PrefixCache | None:
        """Stop using the prefix cache and return it, to be closed; pending blocks are not stored."""
        for seq in running:
            self._end_restore(seq)
        self._kv.before_drop = lambda cached_seq: None
        prefix_cache, self.prefix_cache = self.prefix_cache, None
        return prefix_cache

    def save_checkpoint(self, seq: Sequence) -> None:
        """Save a recurrent checkpoint if later requests may need one here."""
        n_past = seq.n_past
        if not seq.request.cache_prompt or seq.cached_seq is None or seq.n_past_uncut < n_past:
            return
        if seq.pictures.is_edge(n_past) or is_checkpoint_position(n_past, len(seq.tokens)):
            self._kv.save_checkpoint(seq.cached_seq)

    def preempt(self, seq: Sequence, *, keep: bool) -> None:
        """Release the cells of a request that resumes later; unless `keep`, it is prefilled again."""
        self._end_restore(seq)
        if seq.cached_seq is not None:
            self._kv.release(seq.cached_seq, keep=keep)
            seq.cached_seq = None

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Release the prefix of a request that has ended; if `keep`, later requests may reuse it."""
        self._end_restore(seq)
        if seq.cached_seq is None:
            return
        is_whole = seq.n_past_uncut == seq.n_past
        cached_seq, seq.cached_seq = seq.cached_seq, None
        cached_seq.conversation = seq.request.conversation
        cached_seq.is_prefetched = seq.is_prefill_only
        if keep and is_whole:
            self._kv.save_checkpoint(cached_seq)
        self._kv.release(cached_seq, keep=keep)
        if not seq.request.cache_on_disk:
            return
        cached_seq.memory_only_from = None
        if keep and self.prefix_cache is not None:
            self.prefix_cache.writer.add(cached_seq, self._chunks.s_per_token)
            self.prefix_cache.note_preamble(seq.request, seq.tokens, seq.adapters)
            if seq.n_generated >= _WORTH_DRAFTING_TOKENS:
                answer = text_only(seq.tokens[-seq.n_generated - CONTEXT_TOKENS :])
                request = seq.request
                self.prefix_cache.folder.add_answer(request.cache_salt, request.conversation, answer)
