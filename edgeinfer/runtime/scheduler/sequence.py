"""A request while it is decoded: its tokens, sampler, timings, and event stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
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
from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence, LongestMatch
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.prefix_cache.cache import Restore
from edgeinfer.runtime.prompt_tokens import PromptTokens, text_only
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.grammar import TokenMatcher
from edgeinfer.runtime.sampling.output import Output, ReasoningBudget, chosen_logprobs, token_logprobs
from edgeinfer.runtime.sampling.speculative import Drafting
from edgeinfer.runtime.scheduler.observer import SequenceObserver, TokenRecorder
from edgeinfer.runtime.vision import PromptPictures, Span

_MINUS_INFINITY = np.float32(-np.inf)


@dataclass(slots=True)
class RequestClock:
    """Monotonic seconds of a request's stages; 0.0 before each."""

    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request. `tokens` are the prompt and the sampled tokens; `n_past` of them are in the KV cache.

    `keep_tokens` returns how many tokens at the front survive a context shift; `delayed_s` is how long
    decode-only steps have delayed its prefill. While `restore` is set, blocks are read from disk, and
    the planner skips the sequence.
    """

    request: GenerateRequest
    tokens: PromptTokens
    sampler: Sampler
    output: Output
    drafting: Drafting
    max_tokens: int
    keep_tokens: Callable[[], int]
    adapters: AdapterKey = ()
    matcher: TokenMatcher | None = None
    budget: ReasoningBudget | None = None
    banned: npt.NDArray[np.int64] | None = None
    deadline: float | None = None
    stream: EventStream = field(init=False)
    clock: RequestClock = field(default_factory=RequestClock)
    cached_seq: CachedSequence | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    closest: LongestMatch = field(default_factory=LongestMatch)
    divergence: Divergence = field(default_factory=Divergence)
    restore: Restore | None = None
    pictures: PromptPictures = field(default_factory=PromptPictures)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    observers: tuple[SequenceObserver, ...] = ()
    recorder: TokenRecorder | None = None
    n_generated: int = 0
    delayed_s: float = 0.0
    constraint_s: float = 0.0
    saved_s: float = 0.0
    cancelled: bool = False
    wake: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.stream = EventStream(self.cancel)
        replay = self.request.replay
        if self.request.record_tokens or replay is not None:
            self.recorder = TokenRecorder(self.tokens, replay.answer if replay else None)
            self.observers = (self.recorder,)
        if self.sampler.history:
            self.sampler.accept(text_only(self.tokens[-self.sampler.history :]))

    def cancel(self) -> None:
        """Request the end; the loop sees it at its next step. Any thread."""
        self.cancelled = True
        self.wake()

    @property
    def cached(self) -> CachedSequence:
        """The cached sequence, which every sequence has while it is computed."""
        assert self.cached_seq is not None
        return self.cached_seq

    @property
    def n_past(self) -> int:
        return len(self.cached_seq.tokens) if self.cached_seq else 0

    @property
    def n_past_uncut(self) -> int:
        """Number of tokens in the KV cache before a picture of which it has only some rows."""
        return self.tokens.cut(self.n_past)

    @property
    def n_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.n_past

    @property
    def position(self) -> int:
        """Position of the next token, or the first one of the next picture rows."""
        return self.tokens.position(self.n_past)

    @property
    def is_fetching(self) -> bool:
        return self.restore is not None

    @property
    def picture(self) -> Span | None:
        """The picture that comes next in the prompt; None if text comes next."""
        return self.pictures.at(self.n_past)

    @property
    def encoding(self) -> Span | None:
        """The picture that comes next if it is not encoded yet."""
        span = self.picture if self.cached_seq is not None and not self.is_fetching else None
        return span if span is not None and self.pictures.is_encoding(span) else None

    @property
    def is_prefill_only(self) -> bool:
        """Return whether only the prompt is computed: a warm-up for an expected request."""
        return self.max_tokens == 0 and self.request.prompt_logprobs is None

    @property
    def is_low_priority(self) -> bool:
        return self.request.background and self.is_prefill_only

    @property
    def is_decoding(self) -> bool:
        """Return whether only the last sampled token is to be computed."""
        return self.n_generated > 0 and self.n_pending == 1

    def sample(
        self, vocab: Vocab, context: Any, row: int, logits: npt.NDArray[np.float32]
    ) -> FinishReason | None:
        """Sample from a row of logits and emit events; return the finish reason, if it ended."""
        top = self.request.logprobs
        report = None if top is None else token_logprobs(logits, top)
        for observer in self.observers:
            observer.on_logits(logits)
        if self.banned is not None:
            logits[self.banned] = _MINUS_INFINITY
        if self.matcher is not None:
            self._mask(logits)
        token = self.sampler.sample(context, row, logits)
        reason = self._take(vocab, token, chosen_logprobs(vocab, token, *report) if report else None)
        if reason is None and self.budget is not None and self.budget.is_spent(self.output):
            reason = self._close_reasoning(vocab, self.budget.close)
        if reason is None and self.matcher is not None and top is None:
            reason = self._take_all(vocab, self.matcher.forced_tokens())
        return reason

    def _mask(self, logits: npt.NDArray[np.float32]) -> None:
        assert self.matcher is not None
        started = time.perf_counter()
        self.matcher.mask_into(logits)
        self.constraint_s += time.perf_counter() - started

    def _take(self, vocab: Vocab, token: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        self._note_time()
        self.tokens.append(token)
        self.n_generated += 1
        for observer in self.observers:
            observer.on_token(token)
        if self.recorder is not None and self.recorder.differs:
            return "stop"
        if vocab.is_eos(token) and not self.request.ignore_eos:
            if logprobs is not None and self.request.prompt_logprobs is not None:
                self.output.note(logprobs)  # evaluators drop the last entry as the generated token's
            return "stop"
        for event in self.output.feed(token, logprobs):
            self._emit(event)
        if self.output.stopped_by is not None:
            return "stop"
        if self.matcher is not None and self._accept(token):
            return "stop"
        return "length" if self.n_generated >= self.max_tokens else None

    def _accept(self, token: int) -> bool:
        assert self.matcher is not None
        started = time.perf_counter()
        self.matcher.accept(token)
        done = self.matcher.is_done
        self.constraint_s += time.perf_counter() - started
        return done

    def _close_reasoning(self, vocab: Vocab, close: Tokens[int]) -> FinishReason | None:
        """End the reasoning span, unless a constraint needs another token before."""
        if self.matcher is not None and self.matcher.valid(close) < len(close):
            return None
        return self._take_all(vocab, close)

    def _take_all(self, vocab: Vocab, tokens: Iterable[int]) -> FinishReason | None:
        for token in tokens:
            self.sampler.accept((token,))
            reason = self._take(vocab, token, None)
            if reason is not None:
                return reason
        return None

    def _note_time(self) -> None:
        now = time.monotonic()
        self.clock.first = self.clock.first or now
        self.clock.last = now

    def progress(self) -> None:
        done = min(self.n_past, self.prompt_tokens)
        self.stream.put(Progress(done, self.prompt_tokens, queued=self.cached_seq is None))

    def finish(self, reason: FinishReason) -> None:
        """Emit the held text and, once it is counted, the end. Frees the sampler."""
        for event in self.output.finish(cut=reason != "stop"):
            self._emit(event)
        if reason == "stop" and self.output.has_tool_calls:
            reason = "tool_calls"
        self._end(
            Finished(
                reason=reason,
                usage=self.usage(),
                timings=self.timings(),
                divergence=self.divergence,
                stop_sequence=self.output.stopped_by,
                record=self.recorder.record() if self.recorder else None,
            )
        )

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            observer.on_event(event)
        self.stream.put(event)

    def fail(self, error: EngineError) -> None:
        """End with an error, raised from the consumer's iteration."""
        self._end(error)

    def _end(self, last: Finished | EngineError) -> None:
        for observer in self.observers:  # before the event, at which `run` ends the process
            observer.on_end(last, self.output.n_broken_calls)
        self.drafting.close()  # before the event, too: the next request goes on with its text
        self.stream.put(last)
        self.sampler.close()
        self.pictures.close()

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            cached_disk_tokens=self.cached_disk_tokens,
            completion_tokens=self.n_generated,
            reasoning_tokens=self.output.reasoning_tokens,
        )

    def timings(self) -> Timings:
        c = self.clock
        started = c.started or time.monotonic()
        read = time.monotonic() if self.max_tokens == 0 and c.started else c.first
        return Timings(
            queue_ms=(started - c.submitted) * 1000.0,
            prefill_ms=(read - c.started) * 1000.0 if read else 0.0,
            ttft_ms=(c.first - c.submitted) * 1000.0 if c.first else 0.0,
            decode_ms=(c.last - c.first) * 1000.0,
            constraint_ms=self.constraint_s * 1000.0,
            draft_tokens=self.drafting.drafted,
            draft_accepted_tokens=self.drafting.accepted,
            saved_ms=self.saved_s * 1000.0,
        )


@dataclass(slots=True)
class BatchEntry:
    """A sequence's share of a batch: its tokens with draft tokens.

    `row`: the first of its rows to sample from, among the batch's rows with logits.
    """

    seq: Sequence
    row: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    has_output: bool = True
    is_prefill: bool = False
