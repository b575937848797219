"""The request queue: which requests wait and run, when one is admitted, and how one ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from edgeinfer.errors import EngineError
from edgeinfer.runtime.events import FinishReason
from edgeinfer.runtime.kv_cache.cache import KvCache, common_prefix
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.sequence import Sequence


class Roster:
    """Requests `waiting` for a place, or `running`. `on_end` is told of each that leaves."""

    def __init__(self, prefixes: Prefixes, counters: Counters) -> None:
        self._prefixes, self._counters = prefixes, counters
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.on_end: Callable[[Sequence], None] = lambda seq: None

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a request."""
        self._counters.requests += 1
        self.waiting.append(seq)

    def end_cancelled_and_late(self) -> None:
        """End what was cancelled, and what is beyond its deadline."""
        now = time.monotonic()
        for seq in [*self.running, *self.waiting]:
            if seq.cancelled:
                self._counters.cancelled += 1
                self.end(seq, "cancelled")
            elif seq.deadline is not None and now >= seq.deadline:
                self.end(seq, "deadline")

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a request that has its answer, or will have no more of it."""
        self._leave(seq, lambda s: s.finish(reason), keep=seq.request.cache_prompt)

    def fail(self, seq: Sequence, error: EngineError) -> None:
        """End a request with an error."""
        self._leave(seq, lambda s: s.fail(error), keep=False)

    def _leave(self, seq: Sequence, farewell: Callable[[Sequence], None], *, keep: bool) -> None:
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._prefixes.leave_behind(seq, keep=keep)
        self._book(seq)
        self.on_end(seq)  # before the consumer learns of it, who may look at the metrics then
        farewell(seq)

    def _book(self, seq: Sequence) -> None:
        c = self._counters
        c.completion_tokens += seq.n_generated
        c.constraint_s += seq.constraint_s
        c.draft_tokens += seq.drafting.drafted
        c.draft_accepted += seq.drafting.accepted


#: A prefix that another sequence is about to compute is waited for when it saves at least this many
#: tokens.
_WORTH_WAITING = 32


class Admission:
    """Lets `n_parallel` requests of the roster run. `can_cut`: a prefix can be shared anywhere."""

    def __init__(
        self, roster: Roster, prefixes: Prefixes, kv: KvCache, *, n_parallel: int, can_cut: bool
    ) -> None:
        self._roster = roster
        self._prefixes = prefixes
        self._kv = kv
        self._n_parallel, self._can_cut = n_parallel, can_cut

    def admit(self) -> None:
        """Let requests in, those that only compute a prompt when nobody else wants the place."""
        waiting, running = self._roster.waiting, self._roster.running
        while waiting:
            seq = next((s for s in waiting if not s.is_prefill_only), waiting[0])
            if len(running) >= self._n_parallel and not self._make_place(seq):
                break
            waiting.remove(seq)
            running.append(seq)
        self._give_cells()

    def _make_place(self, seq: Sequence) -> bool:
        """Send one that only computes a prompt back to the queue, with what it has computed kept."""
        early = [s for s in self._roster.running if s.is_prefill_only]
        if seq.is_prefill_only or not early:
            return False
        self._prefixes.give_up(early[-1], keep=True)
        self._roster.running.remove(early[-1])
        self._roster.waiting.append(early[-1])
        return True

    def _give_cells(self) -> None:
        """Who waits for a prefix lets later ones pass; who waits for cells does not, lest it starve."""
        running = self._roster.running
        for seq in [s for s in running if s.resident is None]:
            cached = self._prefixes.in_memory(seq)
            active = [s for s in running if s.resident is not None]
            if self._soon_shared(seq, active) >= cached + _WORTH_WAITING:
                continue
            if active and not self._fits(seq, cached, active):
                return
            self._prefixes.take_over(seq, is_alone=len(running) == 1)

    def _fits(self, seq: Sequence, cached: int, active: list[Sequence]) -> bool:
        """Whether cells are left for `seq` beside those in use and those promised to other prompts."""
        in_use = len(set().union(*(s.resident.cells for s in active if s.resident)))
        promised = sum(s.n_pending for s in active)
        return in_use + promised + len(seq.tokens) - cached <= self._kv.n_cells

    def _soon_shared(self, seq: Sequence, active: list[Sequence]) -> int:
        """The longest prefix of `seq` that a sequence still prefilling is going to have."""
        if not (self._can_cut and seq.request.cache_prompt):
            return 0
        prefilling = [
            s
            for s in active
            if s.n_pending > 1
            and s.adapters == seq.adapters
            and s.request.cache_prompt
            and s.request.cache_salt == seq.request.cache_salt
            and not s.is_prefill_only
            and seq.request.prompt_logprobs in (None, s.request.prompt_logprobs)
        ]
        limit = len(seq.tokens) - 1
        return max((min(limit, common_prefix(s.tokens, seq.tokens)) for s in prefilling), default=0)
