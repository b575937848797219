"""The decode loop's step: admit requests, plan a batch, run it, process its output.

Each step is one llama_decode. It carries the next token of every decoding sequence, with draft tokens
after it, and fills the rest of the batch with chunks of prompts (continuous batching, chunked
prefill), so a long prompt never stalls the others. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence, KvCache
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.memory_plan import invariant_rows
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.prefix_cache.cache import PrefixCache, make_states, scratch_id
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.recurrent_checkpoints import Checkpoints
from edgeinfer.runtime.sampling.speculative import StepCurve
from edgeinfer.runtime.scheduler.batch_planner import BatchPlanner
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.output_processor import OutputProcessor
from edgeinfer.runtime.scheduler.prefill_policy import IDLE_CHUNK_TOKENS, BatchInvariance, ChunkSizer
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import Sequence

#: Idle time (s) after which cells are emptied.
_IDLE_S = 300.0
#: Interval (s) at which pending writes are checked.
_WRITING_S = 0.5
#: Least number of idle tokens for which memory is returned.
_WORTH_TOKENS = 512


class IdleCells:
    """Return the memory of `kv`, the active context's cells, after some minutes without a request.

    Their contents are in the prefix cache on disk then. llama.cpp does not say which cells are free, so
    all are emptied; a pinned prefix is written back to `states` (decision 088). One thread.
    """

    def __init__(
        self, kv: KvCache, prefixes: Prefixes, states: SequenceStates | None, active: ActiveContext
    ) -> None:
        self._kv, self._prefixes = kv, prefixes
        self._states = states
        self._active = active
        self._ranges: list[Range] = []
        self._used_at = time.monotonic()

    def note_use(self) -> None:
        """Stop returning memory: a step is about to use cells."""
        self._used_at = time.monotonic()
        self._ranges.clear()

    def due_in_s(self) -> float | None:
        """Return the seconds until there is work; None without any."""
        if self._ranges:
            return 0.0
        cache = self._prefixes.prefix_cache
        if not self._active.cells.buffers or cache is None or not self._is_on_disk(cache):
            return None
        least_s = 0.0 if cache.folder.writer_thread.is_idle else _WRITING_S
        return max(least_s, self._used_at + _IDLE_S - time.monotonic())

    def _is_on_disk(self, cache: PrefixCache) -> bool:
        if not cache.can_store:
            return False
        idle = [cached_seq for cached_seq in self._kv.cached_sequences if not cached_seq.pinned]
        if cache.writer.has_work or sum(len(c.cells) for c in idle) < _WORTH_TOKENS:
            return False
        return all(not c.active and cache.writer.would_store(c) for c in idle)

    def work(self) -> None:
        """Empty the cells, then return one piece of their memory. Only while idle."""
        if self._ranges:
            self._active.cells.give_back([self._ranges.pop()])
            return
        self._kv.drop_idle()
        pinned = [cached_seq for cached_seq in self._kv.cached_sequences if cached_seq.pinned]
        if pinned:
            self._give_back_around(pinned)
        else:
            self._ranges = list(self._active.cells.pages())

    def _give_back_around(self, pinned: list[CachedSequence]) -> None:
        assert self._states is not None
        states = []
        for cached_seq in pinned:
            state = self._states.read(cached_seq.seq_id, 0, len(cached_seq.tokens))
            is_recurrent = not self._kv.supports_truncation
            checkpoint = self._states.read_checkpoint(cached_seq.seq_id) if is_recurrent else None
            states.append((cached_seq, state, checkpoint))
        for cached_seq in pinned:
            self._kv.clear_cells(cached_seq)
        self._active.cells.give_back()
        for cached_seq, state, checkpoint in states:
            is_back = state is not None and self._states.write(cached_seq.seq_id, state)
            if is_back and checkpoint is not None:
                is_back = self._states.write_checkpoint(cached_seq.seq_id, checkpoint)
            if not is_back:
                self._kv.drop(cached_seq)


#: How long (s) a step waits for a picture that is being encoded if there is nothing else to do.
_PICTURE_WAIT_S = 0.02

#: Assumed cost of prefill before the first measurement (s per token and byte of its weights): half of
#: that of a 4B in Q4_0 on two cores.
_PREFILL_S_PER_BYTE = 1e-11
#: Bounds for llama.cpp's own attention over an f16 cache. It uses another kernel from 64 tokens on, and
#: splits a single token's work among threads from 512 cells on. llama.cpp pads cells to multiples of
#: 256, and 192 cells with 60 rows stay within the first.
_LLAMA_INVARIANCE = BatchInvariance(rows=60, cells=192)
#: Share of a step's time that reading streamed weights of a dense model takes, whatever its rows.
_STREAMED_SHARE = 0.9
#: Suffixes of metadata keys; a model with one uses llama.cpp's attention (decision 095).
_LEFT_TO_LLAMA = ("attn_logit_softcapping", "max_alibi_bias")
#: The elements of a head that native/attention.cpp takes: up to so many, in whole steps.
_MOST_HEAD, _HEAD_STEP = 256, 16


class Scheduler:
    """Owns `active`, the context that decodes, while it runs."""

    def __init__(self, loaded: LlamaModel, active: ActiveContext, adapters: LoraAdapters) -> None:
        vocab, batch = loaded.vocab, Batch.of(active, max_outputs=loaded.plan.n_outputs)
        states = make_states(loaded, active) if loaded.memory else None
        checkpoints = None if loaded.supports_truncation or states is None else Checkpoints(states)
        self.kv = kv = KvCache(
            active,
            n_cells=loaded.n_cells,
            n_seq_max=scratch_id(loaded),
            checkpoints=checkpoints,
            window=loaded.sliding_window,
        )
        self._active = active
        self._batch_invariance = batch_invariance(loaded)
        #: Called if llama.cpp fails a step; True if another context takes over.
        self.on_failed_step: Callable[[DecodeError], bool] = lambda error: False
        self.counters = Counters()
        shape = loaded.shape
        share = min(1.0, shape.embedding_bytes / max(1, shape.weights_bytes_per_token))
        streaming = loaded.plan.streaming
        is_streamed = streaming is not None and streaming.streamed_bytes > 0
        costs = StepCurve(logits_share=share, shared_share=_STREAMED_SHARE if is_streamed else 0.0)
        s_per_token = shape.weights_bytes_per_token * _PREFILL_S_PER_BYTE
        chunks = ChunkSizer(self._batch_invariance, s_per_token)
        self.prefixes = Prefixes(kv, chunks, self.counters, vocab)
        self.queue = RequestQueue(self.prefixes, kv, self.counters, n_parallel=loaded.n_parallel)
        self.executor = Executor(
            active=active,
            batch=batch,
            adapters=adapters,
            kv=kv,
            chunks=chunks,
            costs=costs,
            counters=self.counters,
        )
        self._planner = BatchPlanner(
            self.executor, self.queue, batch_invariance=self._batch_invariance, n_ctx=loaded.n_ctx
        )
        self._output_processor = OutputProcessor(self.executor, self.queue, vocab)
        self._idle_cells = IdleCells(kv, self.prefixes, states, active)

    def step(self) -> None:
        """End cancelled and late requests, admit others, decode one batch, process its output."""
        began = time.perf_counter()
        self._idle_cells.note_use()
        running = self.queue.running
        self.queue.end_cancelled_and_late()
        self.queue.admit()
        self.prefixes.restore(running)
        self._fail_unencoded(running)
        entries = self._planner.plan()
        if not entries:
            self.prefixes.wait_for_disk(running)
            self._wait_for_picture(running)
            return
        try:
            decode_s = self.executor.run(entries)
        except DecodeError as error:
            if not self.on_failed_step(error):
                raise
            return
        if decode_s is None:
            return
        self.counters.steps_total += 1  # before a client that has its answer can ask
        self._output_processor.process(entries)
        self.counters.python_seconds_total += time.perf_counter() - began - decode_s
        self.prefixes.write_blocks(is_idle=False)

    def _fail_unencoded(self, running: list[Sequence]) -> None:
        """End the requests with a picture that could not be encoded."""
        for seq in [s for s in running if s.cached_seq is not None and not s.is_fetching]:
            span = seq.picture
            error = seq.pictures.failure(span) if span is not None else None
            if error is not None:
                self.queue.fail(seq, error)

    def _wait_for_picture(self, running: list[Sequence]) -> None:
        """Wait for a picture that is being encoded, if there is nothing to compute."""
        for seq in running:
            span = seq.encoding
            if span is not None:
                seq.pictures.wait(span, _PICTURE_WAIT_S)
                return

    def chore_due_in_s(self) -> float | None:
        """Return the seconds until idle work is due; None without any."""
        return 0.0 if self.prefixes.has_writes else self._idle_cells.due_in_s()

    def do_chore(self) -> None:
        """Store one pending block, or return a piece of memory. Only while idle."""
        if self.prefixes.has_writes:
            self.prefixes.write_blocks(is_idle=True)
        elif self._idle_cells.due_in_s() == 0.0:
            self._idle_cells.work()

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error` and drop the cache."""
        for seq in [*self.queue.running, *self.queue.waiting]:
            self.queue.fail(seq, error)
        self.kv.drop_idle(pinned=True)

    def switch_context(self, active: ActiveContext, *, knows: bool, on_device: bool) -> None:
        """Continue in another context, which has a copy of this one's cells (`knows`) or is empty.

        Only between steps, and without a prefix cache. A device computes whole batches of a prompt, and
        is not batch-invariant, so there are no automatic drafts on one.
        """
        self.executor.chunks.idle_chunk_tokens = (
            self.executor.batch.capacity if on_device else IDLE_CHUNK_TOKENS
        )
        if not knows:
            for seq in self.queue.running:
                self.prefixes.preempt(seq, keep=False)
            self.kv.drop_idle(pinned=True)
        self._planner.batch_invariance = (
            BatchInvariance(rows=1, cells=None) if on_device else self._batch_invariance
        )
        self._active.replace(active)
        self.executor.use_abort()

    def forget_adapters(self, stamps: Collection[str]) -> bool:
        """Drop what was computed with these adapters; False while requests use them."""

        def has(key: AdapterKey) -> bool:
            return any(stamp in stamps for stamp, _ in key)

        if any(has(seq.adapters) for seq in [*self.queue.running, *self.queue.waiting]):
            return False
        for cached_seq in [c for c in self.kv.cached_sequences if has(c.adapters)]:
            self.kv.drop(cached_seq)
        return True

    def measure_steps(self, token: int) -> None:
        """Learn what draft tokens cost. Only while idle. Raises DecodeError."""
        if not self.kv.supports_truncation:
            return
        cached_seq = self.kv.claim(PromptTokens([token]), (), reuse=False)
        if cached_seq is not None:
            self.executor.adapters.use(())
            self.executor.measure_steps(cached_seq, token)
            self.kv.release(cached_seq, keep=False)

    def pin(self, tokens: list[int], adapters: AdapterKey = ()) -> int:
        """Prefill and keep a prefix that many requests share; return its tokens. Only while idle."""
        self._idle_cells.note_use()
        for old in [c for c in self.kv.cached_sequences if c.pinned]:
            self.kv.drop(old)
        cached_seq = self.kv.claim(PromptTokens(tokens), adapters, reuse=False)
        if cached_seq is None or not self.kv.make_room(len(tokens)):
            return 0
        self.executor.compute(cached_seq, tokens)
        self.kv.release(cached_seq, keep=True)
        cached_seq.pinned = True
        return len(tokens)


def _is_left_to_llama(loaded: LlamaModel) -> bool:
    """Return whether native/attention.cpp declines this model's attention."""
    is_odd = any(n > _MOST_HEAD or n % _HEAD_STEP for n in loaded.shape.head_lengths)
    return is_odd or any(key.endswith(_LEFT_TO_LLAMA) for key in loaded.meta)


def batch_invariance(loaded: LlamaModel) -> BatchInvariance:
    """Return the bounds for the kernels, the attention and the KV cache in use."""
    kernels = libllama.build_info().kernels
    rows = loaded.n_batch if kernels else invariant_rows(loaded.n_batch, loaded.shape.file_type)
    kv_type, flash = (loaded.choices[name].value for name in ("kv_type", "flash_attention"))
    is_ours = flash == "on" and bool(kernels) and not _is_left_to_llama(loaded)
    if kv_type != "f16" or is_ours:
        return BatchInvariance(rows, cells=None, in_order=is_ours)
    return BatchInvariance(min(rows, _LLAMA_INVARIANCE.rows), _LLAMA_INVARIANCE.cells, in_order=False)
