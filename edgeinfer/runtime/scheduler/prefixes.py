"""Give sequences the cached prefixes of their prompts, from memory and from disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.runtime.kv_cache import KvCache, common_prefix
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.prefix_cache.cache import BlockLoad, PrefixCache
from edgeinfer.runtime.prompt_tokens import text_only
from edgeinfer.runtime.recurrent_checkpoints import is_checkpoint_position
from edgeinfer.runtime.sampling.past_answers import CONTEXT_TOKENS
from edgeinfer.runtime.scheduler.divergence import describe_divergence, find_longest_match
from edgeinfer.runtime.scheduler.prefill_policy import ChunkSizer
from edgeinfer.runtime.scheduler.sequence import Sequence

_log = logging.getLogger("edgeinfer.blocks")
#: Time limits (s) for restoring KV blocks between two steps: while sequences decode, and otherwise.
_LOAD_S_WHILE_DECODING = 0.02
_LOAD_S = 0.1
#: Idle sequences are evicted before a prefill only if they have at least this many cells in total.
_MIN_EVICTED_CELLS = 1024
#: Shortest answer (tokens) that is stored as a source of draft tokens.
_MIN_ANSWER_TOKENS = 8
#: How long (s) a step waits for the disk, if there is nothing to compute.
_DISK_WAIT_S = 0.02
#: How long (s) a closing engine waits for pending writes.
FLUSH_S = 30.0


def loading_sequences(running: list[Sequence]) -> list[Sequence]:
    """Return the sequences that load blocks.

    Prefill-only ones are left out while a request that wants an answer is prefilled.
    """
    is_awaited = any(s.is_started and not (s.is_decoding or s.is_prefill_only) for s in running)
    return [s for s in running if s.is_loading_blocks and not (is_awaited and s.is_prefill_only)]


class Prefixes:
    """Gives sequences their longest cached prefix, and releases the cells when a request ends."""

    def __init__(self, kv: KvCache, chunk_sizer: ChunkSizer, counters: Counters, vocab: Vocab) -> None:
        self._kv = kv
        self._chunk_sizer = chunk_sizer
        self._counters = counters
        self._vocab = vocab
        #: The on-disk prefix cache, None without one.
        self.prefix_cache: PrefixCache | None = None
        self._make_cache: Callable[..., PrefixCache] | None = None
        self._closing_threads: list[threading.Thread] = []

    @property
    def has_writes(self) -> bool:
        cache = self.prefix_cache  # read once: another thread may clear it
        return cache is not None and cache.saver.has_work

    def write_blocks(self, *, is_idle: bool) -> None:
        """Save one block of an ended sequence, within the time limit of `BlockSaver.step`."""
        if (cache := self.prefix_cache) is not None:
            cache.saver.step(is_idle=is_idle)

    def acquire(self, seq: Sequence, *, is_only_request: bool) -> None:
        """Start `seq` with the longest prefix in memory, and begin to load further blocks from disk.

        If every sequence id is in use, `seq` is not started. `is_only_request`: no other request is
        admitted, so idle sequences may be evicted, and the round-trip check may run before the prefill.
        """
        request = seq.request
        if request.cache_prompt and not seq.clock.prefill_start:
            seq.longest_match = find_longest_match(
                self._kv.cached_sequences, seq.tokens, seq.adapters, request.cache_salt
            )
        n_top = request.prompt_logprobs
        cached_seq = self._kv.allocate(
            seq.tokens, seq.adapters, request.cache_salt, reuse=request.cache_prompt, n_top=n_top
        )
        if cached_seq is None:
            return
        seq.start(cached_seq)
        cached_seq.is_private = not request.cache_prompt
        n_cached = seq.tokens.round_down(common_prefix(cached_seq.tokens, seq.tokens[:-1]))
        if n_top is not None:
            n_cached = min(n_cached, len(cached_seq.logprobs))
            seq.prompt_logprobs = cached_seq.logprobs[:n_cached]
        if not self._kv.truncate(cached_seq, n_cached):
            n_cached = 0
            seq.prompt_logprobs = []
        if request.cache_prompt and request.speculative != "off" and self.prefix_cache is not None:
            seq.drafting.use_answers(self.prefix_cache.folder.answers.of(request.cache_salt))
        if is_only_request:
            self._evict_idle(len(seq.tokens) - n_cached)
        if request.cache_prompt and self.prefix_cache is not None and n_top is None:
            seq.block_load = self.prefix_cache.start_load(
                seq.tokens, seq.adapters, request.cache_salt, n_cached, is_only_request=is_only_request
            )
        if seq.block_load is not None:
            self._kv.truncate(cached_seq, seq.block_load.start)
            seq.block_load.n_in_memory = n_cached if self._kv.supports_truncation else 0
        if not request.cache_on_disk:
            self._kv.exclude_from_disk(cached_seq)
        if seq.block_load is None:
            self._begin_prefill(seq, n_cached)

    def _begin_prefill(self, seq: Sequence, n_in_memory: int) -> None:
        n_cached = seq.n_past
        n_from_disk = max(0, n_cached - n_in_memory)
        if not seq.clock.prefill_start:
            seq.clock.prefill_start = time.monotonic()
            seq.n_cached_tokens = n_cached
            seq.n_cached_disk_tokens = n_from_disk
            self._counters.prompt_tokens_total += seq.n_prompt_tokens
            self._counters.cached_tokens_total += n_cached
            self._counters.cached_disk_tokens_total += n_from_disk
            if seq.request.cache_prompt:
                seq.divergence = describe_divergence(
                    seq.tokens, seq.longest_match, n_cached, self._vocab.detokenize
                )
        seq.pictures.encode_after(n_cached)
        seq.report_progress()

    def _evict_idle(self, n_new: int) -> None:
        """Before a large prefill, evict idle sequences that are on disk: attention scans used cells."""
        cache = self.prefix_cache
        if cache is None or not self._kv.supports_truncation or n_new < cache.block_tokens:
            return
        idle = [c for c in self._kv.cached_sequences if cache.can_evict(c)]
        if sum(len(c.cells) for c in idle) >= _MIN_EVICTED_CELLS:
            for cached_seq in idle:
                self._kv.drop(cached_seq)

    def load_blocks(self, running: list[Sequence]) -> None:
        """Restore blocks that have been read, for a limited time: other requests wait meanwhile."""
        is_decoding = any(s.is_decoding for s in running)
        until = time.monotonic() + (_LOAD_S_WHILE_DECODING if is_decoding else _LOAD_S)
        for seq in loading_sequences(running):
            while seq.block_load is not None and seq.block_load.is_ready and time.monotonic() < until:
                self._load_block(seq, seq.block_load)
            block_tokens = self.prefix_cache.block_tokens if self.prefix_cache else 0
            prefill_s = block_tokens * self._chunk_sizer.s_per_token
            if seq.block_load is not None and seq.block_load.is_too_slow(prefill_s):
                self._end_load(seq)

    def _load_block(self, seq: Sequence, load: BlockLoad) -> None:
        assert self.prefix_cache is not None
        continues = self.prefix_cache.load_block(load, seq.cached_seq, seq.tokens)
        if load.is_done or not continues:
            self._end_load(seq, succeeded=continues)

    def _end_load(self, seq: Sequence, *, succeeded: bool = False) -> None:
        if seq.block_load is None:
            return
        load, seq.block_load = seq.block_load, None
        load.cancel()
        if self.prefix_cache is not None and not succeeded:
            self.prefix_cache.drop_unfinished(seq.cached_seq)
        self._kv.truncate(seq.cached_seq, seq.n_past_whole)
        self._begin_prefill(seq, load.n_in_memory)

    def wait_for_disk(self, running: list[Sequence]) -> None:
        """Wait up to 20 ms for a block that is being read. Called if there is nothing to compute."""
        for seq in loading_sequences(running)[:1]:
            if seq.block_load is not None:
                seq.block_load.wait(_DISK_WAIT_S)

    def open_cache(
        self, make_cache: Callable[..., PrefixCache], loaded: LlamaModel, check_outcome: str
    ) -> None:
        """Open the on-disk prefix cache by a call of `make_cache` with `loaded` and `check_outcome`.

        `check_outcome` is the result of the round-trip check, "" if the check has not run yet. After
        `detach_cache`, `attach_cache` calls `make_cache` again. Raises OSError.
        """
        self.prefix_cache = make_cache(loaded, check_outcome)
        self._make_cache = make_cache

    def attach_cache(self, loaded: LlamaModel) -> None:
        """Open the prefix cache of `loaded`, after `detach_cache` has closed the one before.

        Does nothing unless `open_cache` was called. Call this between two steps. States computed on the
        CPU and on a GPU differ, so each device has a separate prefix cache.
        """
        if self._make_cache is None:
            return
        try:
            self.prefix_cache = self._make_cache(loaded)
        except (OSError, SnapshotUnsafeError) as error:  # requests go on without the cache
            _log.warning("the on-disk prefix cache is off: %s", error)

    def detach_cache(self, running: Iterable[Sequence]) -> None:
        """Stop using the prefix cache until `attach_cache`; pending writes continue."""
        for seq in running:
            self._end_load(seq)
        cache, self.prefix_cache = self.prefix_cache, None
        if cache is not None:
            cache.saver.detach()
            thread = threading.Thread(target=cache.folder.close, args=(FLUSH_S,), daemon=True)
            thread.start()
            self._closing_threads.append(thread)

    def close_cache(self) -> None:
        """Wait until pending blocks are written, and stop using the on-disk prefix cache."""
        self._make_cache = None
        self.detach_cache(())
        while self._closing_threads:
            self._closing_threads.pop().join()

    def save_checkpoint(self, seq: Sequence) -> None:
        """Save a recurrent-state checkpoint of `seq`, if its present length needs one."""
        n_past = seq.n_past
        if not seq.request.cache_prompt or seq.n_past_whole < n_past:
            return
        if seq.pictures.is_edge(n_past) or is_checkpoint_position(n_past, len(seq.tokens)):
            self._kv.save_checkpoint(seq.cached_seq)

    def preempt(self, seq: Sequence, *, keep: bool) -> None:
        """Take the cells from a running request, which is started again later.

        With `keep`, its computed tokens stay in the KV cache; otherwise they are computed again.
        """
        self._end_load(seq)
        if seq.is_started:
            self._kv.release(seq.stop(), keep=keep)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Release the sequence of an ended request; with `keep`, later requests may reuse it."""
        self._end_load(seq)
        seq.saved_s = self._chunk_sizer.estimate_prefill_s(seq.n_cached_tokens)
        if not seq.is_started:
            return
        is_whole = seq.n_past_whole == seq.n_past
        cached_seq = seq.stop()
        cached_seq.conversation = seq.request.conversation
        cached_seq.is_prefetched = seq.is_prefill_only
        if keep and is_whole:
            self._kv.save_checkpoint(cached_seq)
        self._kv.release(cached_seq, keep=keep)
        if not seq.request.cache_on_disk:
            return
        cached_seq.memory_only_from = None
        if keep and self.prefix_cache is not None:
            self.prefix_cache.saver.add(cached_seq, self._chunk_sizer.s_per_token)
            self.prefix_cache.record_preamble(seq.request, seq.tokens, seq.adapters)
            if seq.n_generated >= _MIN_ANSWER_TOKENS:
                answer = text_only(seq.tokens[-seq.n_generated - CONTEXT_TOKENS :])
                request = seq.request
                self.prefix_cache.folder.add_answer(request.cache_salt, request.conversation, answer)
