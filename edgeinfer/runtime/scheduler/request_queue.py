"""The waiting and the running requests: admit, preempt, and end them."""

from __future__ import annotations

import time
from collections import deque

from edgeinfer.errors import EngineError
from edgeinfer.runtime.events import FinishReason
from edgeinfer.runtime.kv_cache import KvCache, common_prefix
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.scheduler.observer import RequestObserver
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.sequence import Sequence

#: A request waits while another one prefills their common prefix, if that saves this many tokens.
_MIN_SAVED_TOKENS = 32


class RequestQueue:
    """The requests of an engine: `waiting` ones, and at most `n_parallel` admitted ones in `running`.

    An admitted request is started as soon as cells are free for it. `n_ended` counts ended requests.
    """

    def __init__(self, prefixes: Prefixes, kv: KvCache, counters: Counters, *, n_parallel: int) -> None:
        self.prefixes, self._counters = prefixes, counters
        self._kv = kv
        self._n_parallel = n_parallel
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.n_ended = 0
        #: Observers of all requests that are added from now on.
        self.observers: tuple[RequestObserver, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        self._counters.requests_total += 1
        if seq.request.replay is None:
            seq.observers += tuple(observer.on_admit(seq.request) for observer in self.observers)
        self.waiting.append(seq)

    def end_cancelled_and_expired(self) -> None:
        now = time.monotonic()
        for seq in [*self.running, *self.waiting]:
            if seq.cancelled:
                self._counters.cancelled_total += 1
                self.end(seq, "cancelled")
            elif seq.deadline is not None and now >= seq.deadline:
                self.end(seq, "deadline")

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        self._remove(seq, keep=seq.request.cache_prompt)
        seq.finish(reason)

    def fail(self, seq: Sequence, error: EngineError) -> None:
        self._remove(seq, keep=False)
        seq.end(error)

    def _remove(self, seq: Sequence, *, keep: bool) -> None:
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.prefixes.release(seq, keep=keep)
        counters = self._counters
        counters.completion_tokens_total += seq.n_generated
        counters.constraint_seconds_total += seq.constraint_s
        counters.draft_tokens_total += seq.drafting.drafted
        counters.draft_accepted_total += seq.drafting.accepted
        self.n_ended += 1  # count first: after the last event, a client may read the metrics

    def admit(self) -> None:
        """Move waiting requests to `running`, prefill-only ones last; start those that fit in."""
        waiting, running = self.waiting, self.running
        while waiting:
            seq = next((s for s in waiting if not s.is_prefill_only), waiting[0])
            if len(running) >= self._n_parallel and not self._preempt_prefill_only(seq):
                break
            waiting.remove(seq)
            running.append(seq)
        self._start_admitted()

    def _preempt_prefill_only(self, seq: Sequence) -> bool:
        """Preempt a running prefill-only request for `seq`; return False if there is none."""
        prefill_only = [s for s in self.running if s.is_prefill_only]
        if seq.is_prefill_only or not prefill_only:
            return False
        youngest = prefill_only[-1]
        self.prefixes.preempt(youngest, keep=True)
        self.running.remove(youngest)
        self.waiting.append(youngest)
        return True

    def _start_admitted(self) -> None:
        """Start running requests that have no cells yet, in order, as long as cells are free.

        A request whose prefix another request is prefilling is skipped. If there are too few cells for
        a request, the loop ends; otherwise later, shorter requests would always overtake that request.
        """
        running = self.running
        for seq in [s for s in running if not s.is_started]:
            started = [s for s in running if s.is_started]
            if started:
                n_cached = self._count_cached(seq)
                if self._count_soon_cached(seq, started) >= n_cached + _MIN_SAVED_TOKENS:
                    continue
                if not self._fits(seq, n_cached, started):
                    return
            self.prefixes.acquire(seq, is_only_request=len(running) == 1)

    def _fits(self, seq: Sequence, n_cached: int, started: list[Sequence]) -> bool:
        """Return whether there are cells for `seq` and for the rest of the started prompts."""
        in_use = len(set().union(*(s.cached_seq.cells for s in started)))
        promised = sum(s.n_pending for s in started)
        return in_use + promised + len(seq.tokens) - n_cached <= self._kv.n_cells

    def _count_cached(self, seq: Sequence) -> int:
        """Return how many tokens of a prompt can be reused from the KV cache in memory."""
        request = seq.request
        if not request.cache_prompt:
            return 0
        n_top = request.prompt_logprobs
        return self._kv.match(seq.tokens, seq.adapters, request.cache_salt, n_top=n_top)[1]

    def _count_soon_cached(self, seq: Sequence, started: list[Sequence]) -> int:
        """Return how many tokens of `seq` will be cached when the running prefills have ended."""
        if not (self._kv.supports_truncation and seq.request.cache_prompt):
            return 0
        prefilling = [
            s
            for s in started
            if s.n_pending > 1
            and s.adapters == seq.adapters
            and s.request.cache_prompt
            and s.request.cache_salt == seq.request.cache_salt
            and not s.is_prefill_only
            and seq.request.prompt_logprobs in (None, s.request.prompt_logprobs)
        ]
        limit = len(seq.tokens) - 1
        return max((min(limit, common_prefix(s.tokens, seq.tokens)) for s in prefilling), default=0)
