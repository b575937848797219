"""The engine's step: admit requests, fill a batch, run it, process its results.

A step is one llama_decode. Its batch has the next token of every decoding sequence, draft tokens after
it, and chunks of prompts in the rest (continuous batching, chunked prefill), so that a long prompt
never stalls other requests. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.kv_cache import AdapterKey, KvCache
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.state import make_states
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.recurrent_checkpoints import Checkpoints
from edgeinfer.runtime.sampling.speculative import StepCurve
from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance, batch_invariance
from edgeinfer.runtime.scheduler.batch_planner import BatchPlanner
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.idle_cells import IdleCells
from edgeinfer.runtime.scheduler.output_processor import OutputProcessor
from edgeinfer.runtime.scheduler.prefill_policy import IDLE_CHUNK_TOKENS, ChunkSizer
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import Sequence

#: How long (s) a step waits for a picture to be encoded, if there is nothing else to compute.
_PICTURE_WAIT_S = 0.02

#: Prefill time assumed before the first measurement (s per token and byte of weights): half of what a
#: 4B model in Q4_0 takes on two cores.
_PREFILL_S_PER_BYTE = 1e-11
#: Share of a step's time that streaming a dense model's weights takes, whatever the number of tokens.
_STREAMED_SHARE = 0.9


class EngineCore:
    """Runs the engine's steps on `context`; owns the KV cache, the request queue and the executor."""

    def __init__(self, loaded: LlamaModel, context: LlamaContext, adapters: LoraAdapters) -> None:
        vocab, batch = loaded.vocab, Batch.of(context, max_outputs=loaded.plan.n_outputs)
        states = make_states(loaded, context) if loaded.memory else None
        checkpoints = None if loaded.supports_truncation or states is None else Checkpoints(states)
        self.kv = kv = KvCache(
            context,
            n_cells=loaded.n_cells,
            n_seq_max=loaded.scratch_seq_id,
            checkpoints=checkpoints,
            window=loaded.sliding_window,
        )
        self._context = context
        self._batch_invariance = batch_invariance(loaded)
        #: Called if a step fails; returns whether it has switched the engine to another context.
        self.on_failed_step: Callable[[DecodeError], bool] = lambda error: False
        self.counters = Counters()
        shape = loaded.shape
        logits_share = min(1.0, shape.embedding_bytes / max(1, shape.weights_bytes_per_token))
        streaming = loaded.plan.streaming
        shared_share = _STREAMED_SHARE if streaming is not None and not shape.expert_bytes else 0.0
        step_costs = StepCurve(logits_share=logits_share, shared_share=shared_share)
        s_per_token = shape.weights_bytes_per_token * _PREFILL_S_PER_BYTE
        chunk_sizer = ChunkSizer(self._batch_invariance, s_per_token)
        if streaming is not None:  # long chunks, because each step reads all streamed weights
            chunk_sizer.idle_chunk_tokens, chunk_sizer.least_tokens = batch.capacity, IDLE_CHUNK_TOKENS
        self.prefixes = Prefixes(kv, chunk_sizer, self.counters, vocab)
        self.queue = RequestQueue(self.prefixes, kv, self.counters, n_parallel=loaded.n_parallel)
        self.executor = Executor(
            context=context,
            batch=batch,
            adapters=adapters,
            kv=kv,
            chunk_sizer=chunk_sizer,
            step_costs=step_costs,
            counters=self.counters,
        )
        self._planner = BatchPlanner(
            self.executor, self.queue, batch_invariance=self._batch_invariance, n_ctx=loaded.n_ctx
        )
        self._output_processor = OutputProcessor(self.executor, self.queue, vocab)
        self._idle_cells = IdleCells(kv, self.prefixes, states, context)

    def step(self) -> None:
        """End cancelled and expired requests, admit others, decode one batch, process its output."""
        self._with_cpu_fallback(self._step)

    def _with_cpu_fallback(self, work: Callable[[], None]) -> None:
        """Run `work`. After a DecodeError on a GPU, switch to the CPU; on the CPU, raise the error."""
        try:
            work()
        except DecodeError as error:
            if not self.on_failed_step(error):
                raise

    def _step(self) -> None:
        began = time.perf_counter()
        self._idle_cells.record_use()
        running = self.queue.running
        self.queue.end_cancelled_and_expired()
        self.queue.admit()
        self.prefixes.load_blocks(running)
        self._fail_unencoded(running)
        entries = self._planner.fill_batch()
        if not entries:
            self.prefixes.wait_for_disk(running)
            self._wait_for_picture(running)
            return
        decode_s = self.executor.run(entries)
        if decode_s is None:
            if not self.kv.supports_truncation:  # the aborted step may have changed recurrent states
                for entry in entries:
                    self.prefixes.preempt(entry.seq, keep=False)
            return
        # count before the output processor sends answers: a client may read the counter as soon as it
        # has its answer
        self.counters.steps_total += 1
        self._output_processor.process(entries)
        self.counters.python_seconds_total += time.perf_counter() - began - decode_s
        self.prefixes.write_blocks(is_idle=False)

    def _fail_unencoded(self, running: list[Sequence]) -> None:
        """Fail the requests whose next picture could not be encoded."""
        for seq in [s for s in running if s.is_started and not s.is_loading_blocks]:
            span = seq.picture
            error = seq.pictures.failure(span) if span is not None else None
            if error is not None:
                self.queue.fail(seq, error)

    def _wait_for_picture(self, running: list[Sequence]) -> None:
        """Wait up to 20 ms for a picture to be encoded. Called if there is nothing to compute."""
        for seq in running:
            span = seq.encoding
            if span is not None:
                seq.pictures.wait(span, _PICTURE_WAIT_S)
                return

    def idle_work_due_in_s(self) -> float | None:
        """Return in how many seconds `do_idle_work` has something to do, None for never."""
        return 0.0 if self.prefixes.has_writes else self._idle_cells.due_in_s()

    def do_idle_work(self) -> None:
        """Save one KV block, or give some memory of the KV cache back. Called while no request runs."""
        if self.prefixes.has_writes:
            self._with_cpu_fallback(lambda: self.prefixes.write_blocks(is_idle=True))
        elif self._idle_cells.due_in_s() == 0.0:
            self._idle_cells.release_some()

    def fail_all(self, error: EngineError) -> None:
        """End all requests with `error`, and drop all cached sequences."""
        for seq in [*self.queue.running, *self.queue.waiting]:
            self.queue.fail(seq, error)
        self.kv.drop_idle(include_pinned=True)

    def evict_to_fit(self, n_ctx: int, n_cells: int) -> bool:
        """Evict idle sequences until the used cells fit into `n_cells`.

        Returns False if requests need more cells, or a request already has `n_ctx` tokens.
        """
        requests = [*self.queue.running, *self.queue.waiting]
        are_short = all(len(seq.tokens) < n_ctx for seq in requests)
        return are_short and self.kv.make_room(self.kv.n_cells - n_cells)

    def switch_context(
        self, context: LlamaContext, n_ctx: int, *, has_copy: bool, on_device: bool
    ) -> None:
        """Continue with `context`, on a GPU (`on_device`) or the CPU, instead of the present one.

        `has_copy`: the new context has a copy of all cells; otherwise sequences are prefilled again.
        Call this between steps, while no prefix cache is attached. On a GPU, steps are not
        batch-invariant: chunks of prompts fill the batch, and tokens are drafted only on request.
        """
        self.executor.chunk_sizer.idle_chunk_tokens = (
            self.executor.batch.capacity if on_device else IDLE_CHUNK_TOKENS
        )
        if not has_copy:
            for seq in self.queue.running:
                self.prefixes.preempt(seq, keep=False)
            self.kv.drop_idle(include_pinned=True)
        self.kv.resize(context.n_cells)
        self._planner.n_ctx = n_ctx
        self._planner.batch_invariance = (
            BatchInvariance(max_tokens=1, max_cells=None) if on_device else self._batch_invariance
        )
        self._context.replace(context)
        self.executor.install_abort_callback()

    def drop_sequences_with(self, stamps: Collection[str]) -> bool:
        """Drop the cached sequences that were computed with an adapter in `stamps` (see `AdapterKey`).

        Returns False, without dropping any, while a request uses such an adapter.
        """

        def is_affected(adapters: AdapterKey) -> bool:
            return any(stamp in stamps for stamp, _ in adapters)

        if any(is_affected(seq.adapters) for seq in [*self.queue.running, *self.queue.waiting]):
            return False
        for cached_seq in [c for c in self.kv.cached_sequences if is_affected(c.adapters)]:
            self.kv.drop(cached_seq)
        return True

    def profile_steps(self, first_token: int) -> None:
        """Measure the times of steps with various numbers of tokens, while no request runs.

        The times are recorded in the executor's `step_costs` and `chunk_sizer`. The steps compute the
        token ids `first_token`, `first_token` + 1 and so on. Does nothing if the model does not support
        truncation. Raises DecodeError.
        """
        if not self.kv.supports_truncation:
            return
        cached_seq = self.kv.allocate(PromptTokens([first_token]), (), reuse=False)
        if cached_seq is not None:
            self.executor.adapters.use(())
            self.executor.profile_steps(cached_seq, first_token)
            self.kv.release(cached_seq, keep=False)

    def pin(self, tokens: list[int], adapters: AdapterKey = ()) -> int:
        """Prefill and pin a prefix; return its length, 0 if it does not fit. Raises DecodeError."""
        self._idle_cells.record_use()
        for old in [c for c in self.kv.cached_sequences if c.pinned]:
            self.kv.drop(old)
        cached_seq = self.kv.allocate(PromptTokens(tokens), adapters, reuse=False)
        if cached_seq is None or not self.kv.make_room(len(tokens)):
            return 0
        self.executor.prefill(cached_seq, tokens)
        self.kv.release(cached_seq, keep=True)
        cached_seq.pinned = True
        return len(tokens)
