"""A request in the engine: its tokens, sampler, timings, and event stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
from edgeinfer.runtime.chat_format.detokenizer import Detokenizer, ReasoningBudget
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import (
    Divergence,
    Event,
    Finished,
    FinishReason,
    Progress,
    Timings,
    TokenLogprobs,
    Usage,
)
from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.prefix_cache.cache import BlockLoad
from edgeinfer.runtime.prompt_tokens import PromptTokens, text_only
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.grammar import TokenMatcher
from edgeinfer.runtime.sampling.logprobs import chosen_logprobs, token_logprobs
from edgeinfer.runtime.sampling.speculative import Drafting
from edgeinfer.runtime.scheduler.divergence import LongestMatch
from edgeinfer.runtime.scheduler.observer import SequenceObserver, TokenRecorder
from edgeinfer.runtime.vision import PromptPictures, Span

_MINUS_INFINITY = np.float32(-np.inf)


@dataclass(slots=True)
class RequestClock:
    """When a request reached each stage (monotonic time, s); 0.0 before."""

    submitted: float = field(default_factory=time.monotonic)
    prefill_start: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request in the engine. `tokens` are the prompt's tokens, then the sampled tokens.

    The first `n_past` tokens are in the KV cache. A context shift keeps the first `n_keep` tokens.
    Decode-only steps have delayed the prefill by `delayed_s`. While `block_load` is set, the sequence
    waits for blocks from disk.
    """

    request: GenerateRequest
    tokens: PromptTokens
    sampler: Sampler
    detokenizer: Detokenizer
    drafting: Drafting
    max_tokens: int
    n_keep: int
    adapters: AdapterKey = ()
    matcher: TokenMatcher | None = None
    reasoning_budget: ReasoningBudget | None = None
    banned_tokens: npt.NDArray[np.int64] | None = None
    deadline: float | None = None
    stream: EventStream = field(init=False)
    clock: RequestClock = field(default_factory=RequestClock)
    _cached_seq: CachedSequence | None = field(init=False, default=None)
    n_prompt_tokens: int = field(init=False)
    n_cached_tokens: int = 0
    n_cached_disk_tokens: int = 0
    longest_match: LongestMatch = field(default_factory=LongestMatch)
    divergence: Divergence = field(default_factory=Divergence)
    block_load: BlockLoad | None = None
    pictures: PromptPictures = field(default_factory=PromptPictures)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    observers: tuple[SequenceObserver, ...] = ()
    recorder: TokenRecorder | None = None
    n_generated: int = 0
    delayed_s: float = 0.0
    constraint_s: float = 0.0
    saved_s: float = 0.0
    cancelled: bool = False
    wake_loop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.n_prompt_tokens = len(self.tokens)
        self.stream = EventStream(self.cancel)
        self.report_progress()
        replay = self.request.replay
        if self.request.record_tokens or replay is not None:
            self.recorder = TokenRecorder(self.tokens, replay.answer if replay else None)
            self.observers = (self.recorder,)
        if self.sampler.history:
            self.sampler.accept(text_only(self.tokens[-self.sampler.history :]))

    def cancel(self) -> None:
        """End the request at the next step. Thread-safe."""
        self.cancelled = True
        self.wake_loop()

    @property
    def is_started(self) -> bool:
        """Return whether the request has a sequence id in the KV cache."""
        return self._cached_seq is not None

    @property
    def cached_seq(self) -> CachedSequence:
        """The request's sequence in the KV cache. The request must be started."""
        assert self._cached_seq is not None
        return self._cached_seq

    def start(self, cached_seq: CachedSequence) -> None:
        self._cached_seq = cached_seq

    def stop(self) -> CachedSequence:
        """Detach the request from its sequence in the KV cache; return that sequence."""
        cached_seq, self._cached_seq = self.cached_seq, None
        return cached_seq

    @property
    def n_past(self) -> int:
        """Number of the request's tokens in the KV cache."""
        return len(self._cached_seq.tokens) if self._cached_seq else 0

    @property
    def n_past_whole(self) -> int:
        """Number of the request's tokens in the KV cache, without those of an incomplete picture."""
        return self.tokens.round_down(self.n_past)

    @property
    def n_pending(self) -> int:
        """Number of tokens that must be computed before the next one is sampled."""
        return len(self.tokens) - self.n_past

    @property
    def position(self) -> int:
        """Position of the next token to compute."""
        return self.tokens.position(self.n_past)

    @property
    def is_loading_blocks(self) -> bool:
        return self.block_load is not None

    @property
    def picture(self) -> Span | None:
        """The picture that comes next in the prompt; None if text comes next."""
        return self.pictures.at(self.n_past)

    @property
    def encoding(self) -> Span | None:
        """The picture that comes next in the prompt and is not encoded yet, otherwise None."""
        span = self.picture if self.is_started and not self.is_loading_blocks else None
        return span if span is not None and self.pictures.is_encoding(span) else None

    @property
    def is_prefill_only(self) -> bool:
        """Return whether the prompt is only prefilled, for later requests."""
        return self.max_tokens == 0 and self.request.prompt_logprobs is None

    @property
    def is_decoding(self) -> bool:
        """Return whether only the last sampled token is left to compute."""
        return self.n_generated > 0 and self.n_pending == 1

    def sample(
        self, vocab: Vocab, context: Any, output_index: int, logits: npt.NDArray[np.float32]
    ) -> FinishReason | None:
        """Sample a token, and emit events; return the finish reason, None if the answer continues.

        `logits` is a view of row `output_index` of the logits of `context` (a llama_context).
        """
        n_top = self.request.logprobs
        logprobs = None if n_top is None else token_logprobs(logits, n_top)
        for observer in self.observers:
            observer.on_logits(logits)
        if self.banned_tokens is not None:
            logits[self.banned_tokens] = _MINUS_INFINITY
        if self.matcher is not None:
            started = time.perf_counter()
            self.matcher.mask_into(logits)
            self.constraint_s += time.perf_counter() - started
        token = self.sampler.sample(context, output_index, logits)
        chosen = chosen_logprobs(vocab, token, *logprobs) if logprobs else None
        reason = self._append(vocab, token, chosen)
        budget = self.reasoning_budget
        if reason is None and budget is not None and budget.is_spent(self.detokenizer):
            # the reasoning cannot be closed now if the constraint requires another token here
            can_close = self.matcher is None or self.matcher.valid(budget.close) == len(budget.close)
            reason = self._append_forced(vocab, budget.close) if can_close else None
        if reason is None and self.matcher is not None and n_top is None:
            reason = self._append_forced(vocab, self.matcher.forced_tokens())
        return reason

    def _append(self, vocab: Vocab, token: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        self.clock.last_token = time.monotonic()
        self.clock.first_token = self.clock.first_token or self.clock.last_token
        self.tokens.append(token)
        self.n_generated += 1
        for observer in self.observers:
            observer.on_token(token)
        if self.recorder is not None and self.recorder.differs:
            return "stop"
        if vocab.is_eos(token) and not self.request.ignore_eos:
            if logprobs is not None and self.request.prompt_logprobs is not None:
                # evaluation tools expect log-probabilities of the end token, too, and drop them
                self.detokenizer.hold_logprobs(logprobs)
            return "stop"
        for event in self.detokenizer.feed(token, logprobs):
            self._emit(event)
        if self.detokenizer.stopped_by is not None:
            return "stop"
        if self.matcher is not None:
            started = time.perf_counter()
            self.matcher.accept(token)
            is_done = self.matcher.is_done
            self.constraint_s += time.perf_counter() - started
            if is_done:
                return "stop"
        return "length" if self.n_generated >= self.max_tokens else None

    def _append_forced(self, vocab: Vocab, tokens: Iterable[int]) -> FinishReason | None:
        for token in tokens:
            self.sampler.accept((token,))
            reason = self._append(vocab, token, None)
            if reason is not None:
                return reason
        return None

    def report_progress(self) -> None:
        n_done = min(self.n_past, self.n_prompt_tokens)
        self.stream.put(Progress(n_done, self.n_prompt_tokens, queued=not self.is_started))

    def finish(self, reason: FinishReason) -> None:
        """Emit the text that the detokenizer still holds, then the last event."""
        for event in self.detokenizer.finish(cut=reason != "stop"):
            self._emit(event)
        if reason == "stop" and self.detokenizer.has_tool_calls:
            reason = "tool_calls"
        self.end(
            Finished(
                reason=reason,
                usage=self.usage(),
                timings=self.timings(),
                divergence=self.divergence,
                stop_sequence=self.detokenizer.stopped_by,
                record=self.recorder.record() if self.recorder else None,
            )
        )

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            observer.on_event(event)
        self.stream.put(event)

    def end(self, last_event: Finished | EngineError) -> None:
        """Emit the last event, or the error that ends the event stream, and free the sampler."""
        for observer in self.observers:  # observers first: after the last event the process may end
            observer.on_end(last_event, self.detokenizer.n_broken_calls)
        self.drafting.close()  # first, so that the next request can reuse the draft model's cells
        self.stream.put(last_event)
        self.sampler.close()
        self.pictures.close()

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.n_prompt_tokens,
            cached_tokens=self.n_cached_tokens,
            cached_disk_tokens=self.n_cached_disk_tokens,
            completion_tokens=self.n_generated,
            reasoning_tokens=self.detokenizer.reasoning_tokens,
        )

    def timings(self) -> Timings:
        clock, now = self.clock, time.monotonic()
        queue_end = clock.prefill_start or now
        prefill_end = now if self.max_tokens == 0 and clock.prefill_start else clock.first_token
        return Timings(
            queue_ms=(queue_end - clock.submitted) * 1000.0,
            prefill_ms=(prefill_end - clock.prefill_start) * 1000.0 if prefill_end else 0.0,
            ttft_ms=(clock.first_token - clock.submitted) * 1000.0 if clock.first_token else 0.0,
            decode_ms=(clock.last_token - clock.first_token) * 1000.0,
            constraint_ms=self.constraint_s * 1000.0,
            draft_tokens=self.drafting.drafted,
            draft_accepted_tokens=self.drafting.accepted,
            saved_ms=self.saved_s * 1000.0,
        )


@dataclass(slots=True)
class BatchEntry:
    """The tokens of a sequence in a batch; the last ones are `drafts`.

    `first_output` is the index, in the batch's rows of logits, of the first row to sample from.
    `has_output`: a token is sampled after this entry. `is_prefill`: the tokens are prefilled, so their
    `drafts`, if any, are an answer that is replayed.
    """

    seq: Sequence
    first_output: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    has_output: bool = True
    is_prefill: bool = False
