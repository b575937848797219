"""The decode loop's step: who joins, what goes into the next batch, and what comes out of it.

Each step is one llama_decode. It carries the next token of every decoding sequence (and guesses behind
it), and fills what is left of the batch with the prompts of those still prefilling, so a long prompt
never stalls the others. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.kv_cache.cache import AdapterKey, KvCache
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.sampling.speculative import StepCosts
from edgeinfer.runtime.scheduler.batch_planner import Adapters, Planner, Prefill
from edgeinfer.runtime.scheduler.executor import Execution
from edgeinfer.runtime.scheduler.idle_cells import IdleCells
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.output_processor import Harvest
from edgeinfer.runtime.scheduler.prefill_policy import Chunks, Exactness
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import Admission, Roster


class Scheduler:
    """Owns the active context while it runs. `n_ctx` is what one sequence may use."""

    def __init__(
        self,
        *,
        active: ActiveContext,
        vocab: Vocab,
        kv: KvCache,
        batch: Batch,
        adapters: Adapters,
        n_parallel: int,
        n_ctx: int,
        can_cut: bool,
        exactness: Exactness,
        s_per_token: float,
        states: SequenceStates | None = None,
    ) -> None:
        self.kv = kv
        self._active = active
        self._exactness = exactness
        self._adapters = adapters
        #: Told of a step that llama.cpp failed; True where another context is there to go on in.
        self.on_failed_step: Callable[[DecodeError], bool] = lambda error: False
        self.counters = Counters()
        costs, chunks = StepCosts(), Chunks(exactness, s_per_token)
        self.prefixes = Prefixes(kv, chunks, self.counters, vocab, can_cut=can_cut)
        self.roster = Roster(self.prefixes, self.counters)
        self._admission = Admission(
            self.roster, self.prefixes, kv, n_parallel=n_parallel, can_cut=can_cut
        )
        self._planner = Planner(
            kv=kv,
            batch=batch,
            adapters=adapters,
            roster=self.roster,
            prefixes=self.prefixes,
            prefill=Prefill(kv, batch, chunks, self.roster, self.prefixes, can_cut=can_cut),
            chunks=chunks,
            costs=costs,
            exactness=exactness,
            n_ctx=n_ctx,
            can_cut=can_cut,
        )
        self.execution = Execution(
            active, batch, kv, chunks=chunks, costs=costs, counters=self.counters, can_cut=can_cut
        )
        self._harvest = Harvest(
            active, vocab, kv, roster=self.roster, prefixes=self.prefixes, counters=self.counters
        )

        self._idle_cells = IdleCells(kv, self.prefixes, states, active, can_cut=can_cut)

    def step(self) -> None:
        """End what is cancelled or late, let others in, decode one batch, sample from it."""
        began = time.perf_counter()
        self._idle_cells.note_use()
        running = self.roster.running
        self.roster.end_cancelled_and_late()
        self._admission.admit()
        self.prefixes.restore(running)
        parts = self._planner.plan()
        if not parts:
            self.prefixes.wait_for_disk(running)
            return
        try:
            decode_s = self.execution.run(parts)
        except DecodeError as error:
            if not self.on_failed_step(error):
                raise
            return
        if decode_s is None:
            return
        self._harvest.take(parts)
        self.counters.steps += 1
        self.counters.python_s += time.perf_counter() - began - decode_s
        if self.prefixes.blocks is not None:
            self.prefixes.blocks.writing.work(is_idle=False)

    def chore_due_in_s(self) -> float | None:
        """Seconds until there is something to do while idle; None while there is nothing."""
        if self.prefixes.blocks is not None and self.prefixes.blocks.writing.has_work:
            return 0.0
        return self._idle_cells.due_in_s()

    def do_chore(self) -> None:
        """Write a piece of what waits for it, or give a piece of memory back. Only while idle."""
        if self.prefixes.blocks is not None and self.prefixes.blocks.writing.has_work:
            self.prefixes.blocks.writing.work(is_idle=True)
        elif self._idle_cells.due_in_s() == 0.0:
            self._idle_cells.work()

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error` and forget the cache."""
        for seq in [*self.roster.running, *self.roster.waiting]:
            self.roster.fail(seq, error)
        self.kv.drop_idle(pinned=True)

    def go_over(self, active: ActiveContext, *, knows: bool, on_device: bool) -> None:
        """Go on in another context, which `knows` what this one has computed, or begins empty: then it
        is computed again. Only between steps, and without a store of blocks.

        Nothing was measured of what a device rounds otherwise in company: there, nobody guesses who has
        not asked for it.
        """
        if not knows:
            for seq in self.roster.running:
                self.prefixes.give_up(seq, keep=False)
            self.kv.drop_idle(pinned=True)
        self._planner.exactness = Exactness(rows=1, cells=None) if on_device else self._exactness
        self._active.replace(active)
        self.execution.use_abort()

    def forget_adapters(self, stamps: Collection[str]) -> bool:
        """Forget what was computed with these adapters; False, and not, while requests have them."""

        def has(key: AdapterKey) -> bool:
            return any(stamp in stamps for stamp, _ in key)

        if any(has(seq.adapters) for seq in [*self.roster.running, *self.roster.waiting]):
            return False
        for resident in [r for r in self.kv.residents if has(r.adapters)]:
            self.kv.drop(resident)
        return True

    def pin(self, tokens: list[int], adapters: AdapterKey = ()) -> int:
        """Compute and keep a prefix that many requests begin with; how many tokens. Only while idle."""
        self._idle_cells.note_use()
        for old in [r for r in self.kv.residents if r.pinned]:
            self.kv.drop(old)
        resident = self.kv.claim(tokens, adapters, reuse=False)
        if resident is None or not self.kv.make_room(len(tokens)):
            return 0
        self._adapters.use(adapters)
        self.execution.compute(resident, tokens)
        self.kv.release(resident, keep=True)
        resident.pinned = True
        return len(tokens)
