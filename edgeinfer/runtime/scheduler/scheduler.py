"""The decode loop's step: admit requests, plan a batch, run it, process its output.

Each step is one llama_decode. It carries the next token of every decoding sequence, with draft tokens
behind it, and fills the rest of the batch with chunks of prompts (continuous batching, chunked
prefill), so a long prompt never stalls the others. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.kv_cache.cache import AdapterKey, KvCache
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.sampling.speculative import StepCurve
from edgeinfer.runtime.scheduler.batch_planner import BatchPlanner
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.idle_cells import IdleCells
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.output_processor import OutputProcessor
from edgeinfer.runtime.scheduler.prefill_policy import BatchInvariance, Chunks
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import RequestQueue


class Scheduler:
    """Owns the active context while it runs. `n_ctx` is the limit of one sequence."""

    def __init__(
        self,
        *,
        active: ActiveContext,
        vocab: Vocab,
        kv: KvCache,
        batch: Batch,
        adapters: LoraAdapters,
        n_parallel: int,
        n_ctx: int,
        batch_invariance: BatchInvariance,
        s_per_token: float,
        states: SequenceStates | None = None,
    ) -> None:
        self.kv = kv
        self._active = active
        self._batch_invariance = batch_invariance
        #: Called if llama.cpp fails a step; True if another context takes over.
        self.on_failed_step: Callable[[DecodeError], bool] = lambda error: False
        self.counters = Counters()
        costs, chunks = StepCurve(), Chunks(batch_invariance, s_per_token)
        self.prefixes = Prefixes(kv, chunks, self.counters, vocab)
        self.queue = RequestQueue(self.prefixes, kv, self.counters, n_parallel=n_parallel)
        self._planner = BatchPlanner(
            kv=kv,
            batch=batch,
            adapters=adapters,
            queue=self.queue,
            prefixes=self.prefixes,
            chunks=chunks,
            costs=costs,
            batch_invariance=batch_invariance,
            n_ctx=n_ctx,
        )
        self.executor = Executor(
            active=active,
            batch=batch,
            adapters=adapters,
            kv=kv,
            chunks=chunks,
            costs=costs,
            counters=self.counters,
        )
        self._output_processor = OutputProcessor(
            active=active,
            batch=batch,
            vocab=vocab,
            kv=kv,
            queue=self.queue,
            prefixes=self.prefixes,
            counters=self.counters,
        )
        self._idle_cells = IdleCells(kv, self.prefixes, states, active)

    def step(self) -> None:
        """End cancelled and late requests, admit others, decode one batch, process its output."""
        began = time.perf_counter()
        self._idle_cells.note_use()
        running = self.queue.running
        self.queue.end_cancelled_and_late()
        self.queue.admit()
        self.prefixes.restore(running)
        entries = self._planner.plan()
        if not entries:
            self.prefixes.wait_for_disk(running)
            return
        try:
            decode_s = self.executor.run(entries)
        except DecodeError as error:
            if not self.on_failed_step(error):
                raise
            return
        if decode_s is None:
            return
        self._output_processor.process(entries)
        self.counters.steps_total += 1
        self.counters.python_seconds_total += time.perf_counter() - began - decode_s
        if self.prefixes.blocks is not None:
            self.prefixes.blocks.writing.work(is_idle=False)

    def chore_due_in_s(self) -> float | None:
        """Return the seconds until idle work is due; None without any."""
        if self.prefixes.blocks is not None and self.prefixes.blocks.writing.has_work:
            return 0.0
        return self._idle_cells.due_in_s()

    def do_chore(self) -> None:
        """Store one pending block, or return a piece of memory. Only while idle."""
        if self.prefixes.blocks is not None and self.prefixes.blocks.writing.has_work:
            self.prefixes.blocks.writing.work(is_idle=True)
        elif self._idle_cells.due_in_s() == 0.0:
            self._idle_cells.work()

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error` and drop the cache."""
        for seq in [*self.queue.running, *self.queue.waiting]:
            self.queue.fail(seq, error)
        self.kv.drop_idle(pinned=True)

    def switch_context(self, active: ActiveContext, *, knows: bool, on_device: bool) -> None:
        """Continue in another context, which has a copy of this one's cells (`knows`) or is empty.

        Only between steps, and without a prefix cache. Batch invariance was never measured on devices,
        so there are no automatic drafts on one.
        """
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
        cached_seq = self.kv.claim([token], (), reuse=False) if self.kv.supports_truncation else None
        if cached_seq is not None:
            self.executor.adapters.use(())
            self.executor.measure_steps(cached_seq, token)
            self.kv.release(cached_seq, keep=False)

    def pin(self, tokens: list[int], adapters: AdapterKey = ()) -> int:
        """Prefill and keep a prefix that many requests share; return its tokens. Only while idle."""
        self._idle_cells.note_use()
        for old in [c for c in self.kv.cached_sequences if c.pinned]:
            self.kv.drop(old)
        cached_seq = self.kv.claim(tokens, adapters, reuse=False)
        if cached_seq is None or not self.kv.make_room(len(tokens)):
            return 0
        self.executor.compute(cached_seq, tokens)
        self.kv.release(cached_seq, keep=True)
        cached_seq.pinned = True
        return len(tokens)
