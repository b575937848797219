"""Run a batch as one llama_decode, aborted early for a shorter incoming request."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from edgeinfer.platform.process import lower_thread_priority
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.llama.context import AbortFlag, ActiveContext, Batch
from edgeinfer.runtime.llama.libllama import decode_error
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.row_adapters import MISSED_ADAPTER
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.sampling.speculative import StepCurve
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, ChunkSizer
from edgeinfer.runtime.scheduler.sequence import BatchEntry, Sequence

#: Return codes of llama_decode: no cells are left, and it was aborted.
_NO_CELLS = 1
_ABORTED = 2
#: Most distinct tokens of measured steps: every vocabulary has as many.
_MEASURED_TOKENS = 64
T = TypeVar("T")
#: Most rows with logits in a measured step. Their memory, up to 1 MB each, stays in the parked process.
_MEASURED_OUTPUTS = 16
#: Rows of the measured prefill, by which a resumed engine knows what its cached prefixes save. With 128
#: rows a token costs a quarter less (SmolLM2, zen4), but 6 MB more stay in the parked process.
_MEASURED_PREFILL = 32


@dataclass(slots=True, eq=False, kw_only=True)
class Executor:
    """Run batches on the active context; only if `kv` supports truncation can a step be aborted."""

    active: ActiveContext
    batch: Batch
    adapters: LoraAdapters
    kv: KvCache
    chunks: ChunkSizer
    costs: StepCurve
    counters: Counters
    low_priority: LowPriorityExecutor = field(init=False)
    cancellation: StepCancellation = field(init=False)
    _abort: AbortFlag | None = field(init=False)
    _in_step: list[Sequence] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._abort = AbortFlag() if self.kv.supports_truncation else None
        self.low_priority = LowPriorityExecutor()
        self.use_abort()
        self.cancellation = StepCancellation(self._abort.ask if self._abort else lambda: None)

    def use_abort(self) -> None:
        if self._abort is not None:
            self._abort.put_on(self.active.context)

    def run(self, entries: list[BatchEntry]) -> float | None:
        """Compute the batch; return the seconds, or None if it must be planned again. Raises
        DecodeError.
        """
        began = time.perf_counter()
        code = self._decode(entries)
        if code == _NO_CELLS:  # no cells, although the accounting has some: drop idle ones, and retry
            self.kv.drop_idle(pinned=True)
            code = self._decode(entries)
        if code in (_ABORTED, MISSED_ADAPTER):
            for entry in entries:
                seq = entry.seq
                self.kv.truncate(seq.cached, seq.n_past_uncut)
                self.kv.remove_unrecorded_cells(seq.cached)
            if code == MISSED_ADAPTER:
                self.adapters.leave_kernels()
            return None
        seconds = time.perf_counter() - began
        if code:
            raise decode_error(code, f"a batch of {self.batch.n_tokens} tokens")
        for entry in entries:
            self.kv.extend(entry.seq.cached, entry.tokens)
        self._record_time(entries, seconds)
        return seconds

    def _decode(self, entries: list[BatchEntry]) -> int:
        if all(entry.seq.is_low_priority for entry in entries):
            return self.low_priority.run(lambda: self._decode_or_abort(entries))
        return self._decode_or_abort(entries)

    def _decode_or_abort(self, entries: list[BatchEntry]) -> int:
        """Decode; a prefill-only step can be aborted."""
        if self._abort is None or not all(entry.is_prefill for entry in entries):
            return self.batch.decode(self.active)
        self._abort.clear()
        self._in_step = [entry.seq for entry in entries]
        self.cancellation.begin(
            is_prefill_only=all(seq.is_prefill_only for seq in self._in_step),
            expected_s=self.batch.n_tokens * self.chunks.s_per_token,
        )
        code = self.batch.decode(self.active)
        self.cancellation.end(lost=code == _ABORTED)
        self._in_step = []
        self._abort.clear()
        return code

    def abort_cancelled(self) -> None:
        """Abort the running step if all its requests are cancelled. Any thread."""
        self.cancellation.for_cancel([seq.cancelled for seq in self._in_step])

    def _record_time(self, entries: list[BatchEntry], seconds: float) -> None:
        decode_tokens = sum(len(p.tokens) for p in entries if not p.is_prefill)
        prefill_tokens = self.batch.n_tokens - decode_tokens
        if not prefill_tokens:
            n_forced = decode_tokens - self.batch.n_outputs
            self.costs.note(len(entries), decode_tokens, seconds, n_forced)
            self.counters.decode_seconds_total += seconds
            return
        n_decoding = sum(not p.is_prefill for p in entries)
        decode_share = min(seconds, self.costs.seconds(n_decoding, decode_tokens) or 0.0)
        self.counters.decode_seconds_total += decode_share
        self.counters.prefill_seconds_total += seconds - decode_share
        is_long = any(p.is_prefill and p.seq.prompt_tokens > SHORT_TOKENS for p in entries)
        self.chunks.note(prefill_tokens, seconds - decode_share, is_long=is_long)

    def compute(self, cached_seq: CachedSequence, tokens: list[int]) -> None:
        """Prefill `tokens` after `cached_seq`, outside of any request. Raises DecodeError."""
        for start in range(0, len(tokens), self.batch.capacity):
            chunk = tokens[start : start + self.batch.capacity]
            adapters = cached_seq.adapters
            self.adapters.use(self.adapters.of_context(adapters))
            self.batch.clear()
            past = len(cached_seq.tokens)
            self.batch.add(chunk, past, cached_seq.seq_id, outputs=0, adapters=adapters)
            code = self.batch.decode(self.active)
            if code == MISSED_ADAPTER:
                self.kv.remove_unrecorded_cells(cached_seq)
                self.adapters.leave_kernels()
                self.compute(cached_seq, tokens[start:])
                return
            if code:
                raise decode_error(code, f"a system prompt of {len(tokens)} tokens")
            self.kv.extend(cached_seq, chunk)

    def measure_steps(self, cached_seq: CachedSequence, token: int) -> None:
        """Measure the cost of steps by their number of rows, after an empty sequence. Raises
        DecodeError.
        """
        numbers = itertools.count()

        def step_s(rows: int) -> float:
            self.batch.clear()
            rows = min(rows, self.batch.capacity, self.kv.free_cells)
            outputs = min(rows, self.batch.max_outputs, _MEASURED_OUTPUTS)
            # different tokens for each row and step: in a mixture, equal ones would share their experts
            tokens = [(token + next(numbers)) % _MEASURED_TOKENS for _ in range(rows)]
            self.batch.add(tokens, 0, cached_seq.seq_id, outputs=outputs)
            began = time.perf_counter()
            code = self.batch.decode(self.active)
            took_s = time.perf_counter() - began
            self.kv.remove_unrecorded_cells(cached_seq)
            if code:
                raise decode_error(code, f"{rows} tokens")
            return took_s

        self.costs.measure(step_s)
        rows = min(_MEASURED_PREFILL, self.batch.capacity, self.kv.free_cells)
        self.chunks.note(rows, step_s(rows), is_long=False)


class LowPriorityExecutor:
    """Run work in a thread of low priority, which the first work starts.

    OpenMP creates a team of threads for each thread that computes, and the team inherits its priority.
    The decode thread cannot lower its own priority for a while: only root may raise it again.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            name = "edgeinfer-low-priority"
            self._thread = ThreadPoolExecutor(1, name, initializer=lower_thread_priority)
        return self._thread.submit(work).result()

    def end(self) -> None:
        """End the thread. The next work begins another."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


#: Share of the prefill work that aborted steps may lose.
_LOST_SHARE = 0.05
_MOST_LOST_S = 1.0
#: A step this close to its end (s), with half of it done, is not aborted.
_SOON_S = 0.3


class StepCancellation:
    """Decide when to abort a prefill step, within a budget of lost work. `request_abort` ends the
    running llama_decode. One thread begins and ends steps; any thread may call the other methods.
    """

    def __init__(self, request_abort: Callable[[], None]) -> None:
        self._request_abort = request_abort
        self._lock = threading.Lock()
        self._began: float | None = None
        self._is_prefill_only = False
        self._expected_s = 0.0
        self._allowed_s = _MOST_LOST_S

    def begin(self, *, is_prefill_only: bool, expected_s: float) -> None:
        """Note that a prefill step begins; `is_prefill_only` if no client waits for its prompts yet."""
        with self._lock:
            self._began, self._is_prefill_only = time.monotonic(), is_prefill_only
            self._expected_s = expected_s

    def end(self, *, lost: bool) -> None:
        """Note that the step has ended; `lost` if it was aborted."""
        with self._lock:
            if self._began is None:
                return
            took_s, self._began = time.monotonic() - self._began, None
            if not self._is_prefill_only:
                change_s = -took_s if lost else took_s * _LOST_SHARE
                self._allowed_s = min(_MOST_LOST_S, self._allowed_s + change_s)

    def for_incoming_request(self, n_tokens: int) -> None:
        """Abort the running prefill step for an arriving short request, if little work is lost.

        `n_tokens`: the most that the request has to compute.
        """
        with self._lock:
            if self._began is None:
                return
            lost_s = time.monotonic() - self._began
            is_late = lost_s > max(self._expected_s / 2, self._expected_s - _SOON_S)
            is_worth_it = n_tokens <= SHORT_TOKENS and lost_s <= self._allowed_s and not is_late
            if self._is_prefill_only or is_worth_it:
                self._request_abort()

    def for_cancel(self, cancelled: list[bool]) -> None:
        """Abort the running prefill step if every one of its requests was cancelled."""
        with self._lock:
            if self._began is not None and cancelled and all(cancelled):
                self._request_abort()
