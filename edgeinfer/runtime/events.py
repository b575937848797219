"""The events of one generation: text, reasoning, tool calls, progress, and the end.

A generation yields any number of `Progress`, `TextDelta`, `ReasoningDelta` and `ToolCallDelta`, then
exactly one `Finished`. If requested, one `PromptLogprobs` comes before the first text. After a failure
the iterator raises an EngineError instead. Text is complete UTF-8: an event never splits a character,
and never contains a part of a stop string.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgeinfer.runtime.options import Adapter
from edgeinfer.units import format_cost

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline"]


class Logprob(msgspec.Struct, frozen=True):
    """A token, its text `piece`, and its log-probability (ln) at temperature 1, without penalties."""

    token_id: int
    piece: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A sampled token (`chosen`), and the likeliest tokens (`top`, best first; `chosen` may be one)."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request.

    `cached_tokens` are the prompt tokens that were reused from the prefix cache instead of prefilled;
    `cached_disk_tokens` are the cached tokens that were read from disk, not from memory.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt differs from the most similar cached prefix: after `n_tokens` equal tokens.

    `before` is the text before that point, `here` the prompt's text after it, `there` the cached
    prefix's. `cause`: "text" (the texts differ), "end" (the cached prefix is shorter), "nothing" (no
    prefix is cached), "none" (the whole prompt is cached), "off" (the request did not use the cache).
    """

    n_tokens: int = 0
    cause: Literal["text", "end", "nothing", "none", "off"] = "off"
    before: str = ""
    here: str = ""
    there: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one request (ms), and how many tokens were drafted and accepted.

    `ttft_ms` is the time from submission to the first token, `constraint_ms` the time spent on schemas
    and grammars. `saved_ms` estimates how long prefill of the cached tokens would have taken; 0 if
    unknown.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    constraint_ms: float = 0.0
    draft_tokens: int = 0
    draft_accepted_tokens: int = 0
    saved_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Time (ms) from submission to the last token, or to the end of a prefill-only request."""
        return (self.ttft_ms or self.queue_ms + self.prefill_ms) + self.decode_ms

    def summary(self, cached_tokens: int) -> str:
        """Return a text with the total time and the time that `cached_tokens` saved."""
        return format_cost(self.total_ms / 1000, cached_tokens, self.saved_ms / 1000)

    def decode_tokens_per_s(self, completion_tokens: int) -> float:
        """Return the decode rate (tokens/s) after the first token; 0 if there was at most one."""
        if completion_tokens <= 1 or not self.decode_ms:
            return 0.0
        return (completion_tokens - 1) * 1000.0 / self.decode_ms


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """Progress of prefill: `done_tokens` of `total_tokens`. `queued`: the request still waits."""

    done_tokens: int
    total_tokens: int
    queued: bool = False


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs", tag_field="type"):
    """Log-probabilities of a prompt's tokens except the first, whose text (bytes) is `first`."""

    first: bytes
    tokens: tuple[TokenLogprobs, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """The next part of the answer."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """The next part of the reasoning, without markers such as `<think>`."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call", tag_field="type"):
    """The next part of tool call `index`: first `id` and `name`, then parts of the JSON `arguments`."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


#: Events that contain a part of the answer.
Parsed = TextDelta | ReasoningDelta | ToolCallDelta


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt and its answer, for receipts.

    `logprobs` has an entry per answer token: None if a constraint or the reasoning budget forced it.
    `adapters` have the scales of this request. `irreproducible` says why another engine may compute
    other tokens, "" if none should. If a replay ended at a different token, `replayed_logprob` is the
    log-probability of the expected token.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float | None, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    replayed_logprob: float | None = None
    irreproducible: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", tag_field="type"):
    """The end of a generation. `stop_sequence` is the stop string that caused it; None for none."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_sequence: str | None = None
    divergence: Divergence = Divergence()
    record: TokenRecord | None = None

    @property
    def is_cut_short(self) -> bool:
        """Return whether a limit on tokens or time ended the answer."""
        return self.reason in ("length", "deadline")


Event = Progress | PromptLogprobs | TextDelta | ReasoningDelta | ToolCallDelta | Finished


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a request's prompt was cached, and why not more."""

    model: str
    usage: Usage
    divergence: Divergence

    @classmethod
    def of(cls, model: str, finished: Finished) -> CacheReport:
        """Make the report of a finished generation."""
        return cls(model=model, usage=finished.usage, divergence=finished.divergence)

    @property
    def summary(self) -> str:
        """A line such as "prompt cache: 512 of 530 tokens; new from token 513 on"."""
        usage, where = self.usage, self.divergence
        disk = f", {usage.cached_disk_tokens:,} from disk" if usage.cached_disk_tokens else ""
        cached = f"prompt cache: {usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens{disk}"
        match where.cause:
            case "text":
                return (
                    f"{cached}; matches the cache for {where.n_tokens:,} tokens, then differs: after "
                    f"{_quote(where.before)} {_quote(where.here)} instead of {_quote(where.there)}"
                )
            case "end":
                return f"{cached}; new from token {where.n_tokens + 1:,} on"
            case "nothing":
                return f"{cached}; no cached prefix"
            case "off":
                return f"{cached}; the request did not use the prefix cache"
        return cached


def _quote(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)  # no escape codes for terminals
    return f"“{' '.join(printable.split())}”"
