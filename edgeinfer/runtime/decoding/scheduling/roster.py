"""Keeps the list of who is inside the engine, and ends requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from edgeinfer.errors import EngineError
from edgeinfer.runtime.decoding.metrics import Counters
from edgeinfer.runtime.decoding.scheduling.prefixes import Prefixes
from edgeinfer.runtime.decoding.sequences.sequence import Sequence
from edgeinfer.runtime.events import FinishReason


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
