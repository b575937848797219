"""Run a batch as one llama_decode, aborted early for a request that has less to compute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.kv_cache.cache import KvCache, Resident
from edgeinfer.runtime.llama.context import Abort, ActiveContext, Batch
from edgeinfer.runtime.sampling.speculative import StepCosts
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, Chunks
from edgeinfer.runtime.scheduler.sequence import Part, Sequence

#: What llama_decode returns when it was ended early.
_ABORTED = 2
T = TypeVar("T")

#: As niceness: a tenth of what others get where there is not enough for all.
_NICE = 10


class Execution:
    """Runs batches on the active context, given up early only where its state `can_cut`."""

    def __init__(
        self,
        active: ActiveContext,
        batch: Batch,
        kv: KvCache,
        *,
        chunks: Chunks,
        costs: StepCosts,
        counters: Counters,
        can_cut: bool,
    ) -> None:
        self._active = active
        self._batch = batch
        self._kv = kv
        self._chunks = chunks
        self._costs = costs
        self._counters = counters
        self._abort = Abort() if can_cut else None
        self.background = Background()
        self.use_abort()
        self.interruptions = Interruptions(self._abort.ask if self._abort else lambda: None)
        self._in_step: list[Sequence] = []

    def use_abort(self) -> None:
        """Have the steps of the active context be given up too."""
        if self._abort is not None:
            self._abort.put_on(self._active.context)

    def run(self, parts: list[Part]) -> float | None:
        """Compute the batch; seconds, None when given up for a newcomer. Raises DecodeError."""
        began = time.perf_counter()
        if all(part.seq.is_in_background for part in parts):
            code = self.background.run(lambda: self._decode_or_abort(parts))
        else:
            code = self._decode_or_abort(parts)
        if code == _ABORTED:
            return None
        if code == 1:  # no cells, although our books say there are: free what can be spared, once more
            self._kv.drop_idle(pinned=True)
            code = self._batch.decode(self._active)
        seconds = time.perf_counter() - began
        if code:
            raise DecodeError(
                f"llama_decode returned {code} for a batch of {self._batch.n_tokens} tokens"
            )
        for part in parts:
            assert part.seq.resident is not None
            self._kv.extend(part.seq.resident, part.tokens)
        self._book_time(parts, seconds)
        return seconds

    def _decode_or_abort(self, parts: list[Part]) -> int:
        """A step of nothing but prefill can be given up while it runs; what it computed is dropped."""
        if self._abort is None or not all(part.is_prefill for part in parts):
            return self._batch.decode(self._active)
        self._abort.clear()
        self._in_step = [part.seq for part in parts]
        self.interruptions.begin(
            is_early=all(seq.is_prefill_only for seq in self._in_step),
            expected_s=self._batch.n_tokens * self._chunks.s_per_token,
        )
        code = self._batch.decode(self._active)
        self.interruptions.end(lost=code == _ABORTED)
        self._in_step = []
        self._abort.clear()
        if code == _ABORTED:
            for part in parts:
                assert part.seq.resident is not None
                self._kv.remove_behind(part.seq.resident)
        return code

    def look_at_cancelled(self) -> None:
        """Something was cancelled: a step that nobody waits for any more is given up. Any thread."""
        self.interruptions.for_cancel([seq.cancelled for seq in self._in_step])

    def _book_time(self, parts: list[Part], seconds: float) -> None:
        decode_tokens = sum(len(p.tokens) for p in parts if not p.is_prefill)
        prefill_tokens = self._batch.n_tokens - decode_tokens
        if not prefill_tokens:
            n_drafts = sum(len(p.drafts) for p in parts)
            self._costs.note(len(parts), n_drafts, seconds)
            self._counters.decode_s += seconds
            return
        decode_share = min(seconds, self._costs.mean(decode_tokens) or 0.0)
        self._counters.decode_s += decode_share
        self._counters.prefill_s += seconds - decode_share
        is_long = any(p.is_prefill and p.seq.prompt_tokens > SHORT_TOKENS for p in parts)
        self._chunks.note(prefill_tokens, seconds - decode_share, is_long=is_long)

    def compute(self, resident: Resident, tokens: list[int]) -> None:
        """Compute `tokens` behind what `resident` has, outside of any request. Raises DecodeError."""
        for at in range(0, len(tokens), self._batch.capacity):
            chunk = tokens[at : at + self._batch.capacity]
            self._batch.clear()
            self._batch.add(chunk, len(resident.tokens), resident.seq_id, outputs=0)
            code = self._batch.decode(self._active)
            if code:
                raise DecodeError(
                    f"llama_decode returned {code} for a system prompt of {len(tokens)} tokens"
                )
            self._kv.extend(resident, chunk)


class Background:
    """Runs work in a thread of low priority, which begins with the first.

    llama.cpp's threads begin in the one that computes (OpenMP has a team for each), and have its
    priority. To lower that of the decode thread would be for good: only root may raise it again.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, wait for it, and return what it returns."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "edgeinfer-background", initializer=_be_nice)
        return self._thread.submit(work).result()

    def end(self) -> None:
        """End the thread. The next work begins another."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _be_nice() -> None:
    if sys.platform == "linux":  # elsewhere niceness is a process's
        thread = threading.get_native_id()
        nice = max(os.getpriority(os.PRIO_PROCESS, thread), _NICE)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


#: Work thrown away is at most this share of the prefill that was done.
_LOST_SHARE = 0.05
_MOST_LOST_S = 1.0
#: A step that will be over so soon (seconds) is waited for, if half of it is done.
_SOON_S = 0.3


class Interruptions:
    """`ask` ends the running llama_decode. One thread begins and ends steps, any may call the rest."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._began: float | None = None
        self._is_early = False
        self._expected_s = 0.0
        self._allowed_s = _MOST_LOST_S

    def begin(self, *, is_early: bool, expected_s: float) -> None:
        """A step of prefill begins; `is_early` when nobody waits for its prompts yet."""
        with self._lock:
            self._began, self._is_early = time.monotonic(), is_early
            self._expected_s = expected_s

    def end(self, *, lost: bool) -> None:
        """The step has ended, or has been given up."""
        with self._lock:
            if self._began is None:
                return
            took_s, self._began = time.monotonic() - self._began, None
            if not self._is_early:
                change_s = -took_s if lost else took_s * _LOST_SHARE
                self._allowed_s = min(_MOST_LOST_S, self._allowed_s + change_s)

    def for_newcomer(self, n_tokens: int) -> None:
        """A request has come that has at most so many tokens to compute."""
        with self._lock:
            if self._began is None:
                return
            lost_s = time.monotonic() - self._began
            is_late = lost_s > max(self._expected_s / 2, self._expected_s - _SOON_S)
            is_worth_it = n_tokens <= SHORT_TOKENS and lost_s <= self._allowed_s and not is_late
            if self._is_early or is_worth_it:
                self._ask()

    def for_cancel(self, cancelled: list[bool]) -> None:
        """Requests of the running step were cancelled, or not."""
        with self._lock:
            if self._began is not None and cancelled and all(cancelled):
                self._ask()
