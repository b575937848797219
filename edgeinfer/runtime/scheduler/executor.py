"""Run a batch as one llama_decode, which a short incoming request may abort."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from edgeinfer.platform.process import lower_thread_priority
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.llama.context import AbortFlag, Batch, LlamaContext
from edgeinfer.runtime.llama.libllama import decode_error
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.row_adapters import MISSED_ADAPTER
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.sampling.speculative import StepCurve
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, ChunkSizer
from edgeinfer.runtime.scheduler.sequence import BatchEntry, Sequence

#: Return codes of llama_decode.
_NO_CELLS = 1
_ABORTED = 2
#: Profiled steps use only token ids below 64, which every vocabulary has.
_PROFILED_VOCAB = 64
#: Maximum outputs of a profiled step. Each takes up to 1 MB of memory, which a snapshot then contains.
_PROFILED_OUTPUTS = 16
#: Tokens of the profiled prefill step. From its time, a restored engine estimates how much time cached
#: prefixes save. The estimate from 128 tokens is better (a quarter lower), but adds 6 MB to snapshots.
_PROFILED_PREFILL = 32


@dataclass(slots=True, eq=False, kw_only=True)
class Executor:
    """Runs `batch` on `context`, and measures the time.

    Steps of recurrent models are aborted only when the engine closes: an abort may spoil the state.
    """

    context: LlamaContext
    batch: Batch
    adapters: LoraAdapters
    kv: KvCache
    chunk_sizer: ChunkSizer
    step_costs: StepCurve
    counters: Counters
    cancellation: StepCancellation = field(init=False)
    _abort: AbortFlag = field(init=False, default_factory=AbortFlag)
    _low_priority_thread: ThreadPoolExecutor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.install_abort_callback()
        self.cancellation = StepCancellation(self._abort.set)

    def install_abort_callback(self) -> None:
        self._abort.install(self.context.pointer)

    def abort_all(self) -> None:
        """Abort the running step and every later one. Thread-safe. Called when the engine closes."""
        self._abort.set_for_good()

    def run(self, entries: list[BatchEntry]) -> float | None:
        """Compute the batch; return the time (s), or None if it was aborted. Raises DecodeError."""
        began = time.perf_counter()
        code = self._decode(entries)
        if code == _NO_CELLS:  # KvCache counted more free cells than llama.cpp has: make room
            self.kv.drop_idle(include_pinned=True)
            code = self._decode(entries)
        if code in (_ABORTED, MISSED_ADAPTER):
            for entry in entries:
                seq = entry.seq
                self.kv.truncate(seq.cached_seq, seq.n_past_whole)
                self.kv.remove_unrecorded_cells(seq.cached_seq)
            if code == MISSED_ADAPTER:
                self.adapters.use_llama_cpp()
            return None
        seconds = time.perf_counter() - began
        if code:
            raise decode_error(code, f"a batch of {self.batch.n_tokens} tokens")
        for entry in entries:
            self.kv.record_computed(entry.seq.cached_seq, entry.tokens)
        self._record_time(entries, seconds)
        return seconds

    def _decode(self, entries: list[BatchEntry]) -> int:
        if not all(e.seq.request.background and e.seq.is_prefill_only for e in entries):
            return self._decode_or_abort(entries)
        # a separate thread, because only root may raise a thread's priority again after lowering it;
        # the OpenMP threads that the separate thread creates inherit the low priority
        if self._low_priority_thread is None:
            name = "edgeinfer-low-priority"
            self._low_priority_thread = ThreadPoolExecutor(1, name, initializer=lower_thread_priority)
        return self._low_priority_thread.submit(self._decode_or_abort, entries).result()

    def shutdown(self) -> None:
        """End the low-priority thread. The next background step starts a new thread."""
        if self._low_priority_thread is not None:
            self._low_priority_thread.shutdown()
            self._low_priority_thread = None

    def _decode_or_abort(self, entries: list[BatchEntry]) -> int:
        """Run llama_decode and return its code. A batch that has only prompt tokens can be aborted."""
        if not (self.kv.supports_truncation and all(entry.is_prefill for entry in entries)):
            return self.batch.decode(self.context)
        self._abort.clear()
        expected_s = self.batch.n_tokens * self.chunk_sizer.s_per_token
        self.cancellation.begin([entry.seq for entry in entries], expected_s)
        code = self.batch.decode(self.context)
        self.cancellation.end(lost=code == _ABORTED)
        self._abort.clear()
        return code

    def _record_time(self, entries: list[BatchEntry], seconds: float) -> None:
        decoding = [entry for entry in entries if not entry.is_prefill]
        n_decoded = sum(len(entry.tokens) for entry in decoding)
        n_prefilled = self.batch.n_tokens - n_decoded
        if not n_prefilled:
            n_forced = n_decoded - self.batch.n_outputs
            self.step_costs.record(len(entries), n_decoded, seconds, n_forced)
            self.counters.decode_seconds_total += seconds
            return
        decode_s = min(seconds, self.step_costs.seconds(len(decoding), n_decoded) or 0.0)
        self.counters.decode_seconds_total += decode_s
        self.counters.prefill_seconds_total += seconds - decode_s
        is_long = any(e.is_prefill and e.seq.n_prompt_tokens > SHORT_TOKENS for e in entries)
        self.chunk_sizer.record(n_prefilled, seconds - decode_s, is_long=is_long)

    def prefill(self, cached_seq: CachedSequence, tokens: list[int]) -> None:
        """Append `tokens` to `cached_seq`, in which no request runs. Raises DecodeError."""
        for start in range(0, len(tokens), self.batch.capacity):
            chunk = tokens[start : start + self.batch.capacity]
            adapters = cached_seq.adapters
            self.adapters.use(self.adapters.of_context(adapters))
            self.batch.clear()
            n_past = len(cached_seq.tokens)
            self.batch.add(chunk, n_past, cached_seq.seq_id, outputs=0, adapters=adapters)
            code = self.batch.decode(self.context)
            if code == MISSED_ADAPTER:
                self.kv.remove_unrecorded_cells(cached_seq)
                self.adapters.use_llama_cpp()
                self.prefill(cached_seq, tokens[start:])
                return
            if code:
                raise decode_error(code, f"a system prompt of {len(tokens)} tokens")
            self.kv.record_computed(cached_seq, chunk)

    def profile_steps(self, cached_seq: CachedSequence, first_token: int) -> None:
        """Measure the times of steps with various numbers of tokens, in an empty sequence.

        The times are recorded in `step_costs` and `chunk_sizer`. The steps compute the token ids
        `first_token`, `first_token` + 1 and so on. Raises DecodeError.
        """
        numbers = itertools.count()

        def step_s(n_tokens: int) -> float:
            self.batch.clear()
            n_tokens = min(n_tokens, self.batch.capacity, self.kv.free_cells)
            n_outputs = min(n_tokens, self.batch.max_outputs, _PROFILED_OUTPUTS)
            # tokens differ, because equal ones would use the same experts of a mixture model
            tokens = [(first_token + next(numbers)) % _PROFILED_VOCAB for _ in range(n_tokens)]
            self.batch.add(tokens, 0, cached_seq.seq_id, outputs=n_outputs)
            began = time.perf_counter()
            code = self.batch.decode(self.context)
            took_s = time.perf_counter() - began
            self.kv.remove_unrecorded_cells(cached_seq)
            if code:
                raise decode_error(code, f"{n_tokens} tokens to measure step times")
            return took_s

        self.step_costs.measure(step_s)
        n_tokens = min(_PROFILED_PREFILL, self.batch.capacity, self.kv.free_cells)
        self.chunk_sizer.record(n_tokens, step_s(n_tokens), is_long=False)


#: Aborting prefill steps may waste `_MAX_LOST_S` of their time. Each prefill step that is not aborted
#: adds this share of its time to what may still be wasted.
_LOST_SHARE = 0.05
_MAX_LOST_S = 1.0
#: A step that is at least half done and will end within this time (s) is not aborted.
_ALMOST_DONE_S = 0.3


class StepCancellation:
    """Decides whether to abort a running prefill step; limits the time that aborts waste.

    The function `request_abort` aborts llama_decode. Only the decode thread may call `begin` and `end`.
    """

    def __init__(self, request_abort: Callable[[], None]) -> None:
        self._request_abort = request_abort
        self._lock = threading.Lock()
        self._sequences: list[Sequence] = []  # sequences of the running step
        self._began = self._expected_s = 0.0
        self._allowed_loss_s = _MAX_LOST_S

    def begin(self, sequences: list[Sequence], expected_s: float) -> None:
        """Record the start of a step that prefills `sequences` and should take `expected_s`."""
        with self._lock:
            self._sequences, self._began = sequences, time.monotonic()
            self._expected_s = expected_s

    @property
    def _is_prefill_only(self) -> bool:
        return all(seq.is_prefill_only for seq in self._sequences)

    def end(self, *, lost: bool) -> None:
        """Record the end of the step. `lost`: the step was aborted, so its time is wasted."""
        with self._lock:
            if not self._is_prefill_only:
                took_s = time.monotonic() - self._began
                change_s = -took_s if lost else took_s * _LOST_SHARE
                self._allowed_loss_s = min(_MAX_LOST_S, self._allowed_loss_s + change_s)
            self._sequences = []

    def abort_for_incoming_request(self, n_tokens: int) -> None:
        """Abort a running prefill if the new prompt of `n_tokens` is short and the loss is small."""
        with self._lock:
            if not self._sequences:
                return
            lost_s = time.monotonic() - self._began
            is_late = lost_s > max(self._expected_s / 2, self._expected_s - _ALMOST_DONE_S)
            is_worth_it = n_tokens <= SHORT_TOKENS and lost_s <= self._allowed_loss_s and not is_late
            if self._is_prefill_only or is_worth_it:
                self._request_abort()

    def abort_if_all_cancelled(self) -> None:
        """Abort the running prefill step if all requests in the batch have been cancelled."""
        with self._lock:
            if self._sequences and all(seq.cancelled for seq in self._sequences):
                self._request_abort()
