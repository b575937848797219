"""The events of one generation: text, reasoning, tool calls, progress, and a finish.

A generation yields any number of `Progress`, `TextDelta`, `ReasoningDelta` and `ToolCallDelta`, then
exactly one `Finished`; if asked for, one `PromptLogprobs` comes before the first text. A failure raises
an EngineError from the iterator instead. Text is whole UTF-8: a character is never torn across events,
and nothing of a stop string is ever shown.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgeinfer.units import format_cost

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline"]


class Logprob(msgspec.Struct, frozen=True):
    """A token with its natural-log probability, before sampling (temperature 1, unbiased)."""

    token_id: int
    piece: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A sampled token and the most likely alternatives, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request.

    `cached_tokens` of `prompt_tokens` were not prefilled; `cached_disk_tokens` of those came from the
    on-disk prefix cache, the others from memory.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The point where a prompt diverges from the cached prefixes: after its first `n_tokens`.

    `before`, `here`: its text around that place; `there`: the cached text instead. `cause`: "text"
    differs, the cached prefix comes to its "end", "nothing" is cached, "none" (all was cached), or
    "off" (the request shares nothing, or never ran).
    """

    n_tokens: int = 0
    cause: Literal["text", "end", "nothing", "none", "off"] = "off"
    before: str = ""
    here: str = ""
    there: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one request, milliseconds. TTFT counts from submission to the first token.

    `saved_ms`: about how long the cached tokens would have taken, by the recent cost of prefill; 0 if
    that is unknown.
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
        """Return the time from submission to the last token, or to the end of a mere prefill."""
        return (self.ttft_ms or self.queue_ms + self.prefill_ms) + self.decode_ms

    def cost(self, cached_tokens: int) -> str:
        """Describe the time and what the cached tokens saved."""
        return format_cost(self.total_ms / 1000, cached_tokens, self.saved_ms / 1000)

    def decode_tokens_per_s(self, completion_tokens: int) -> float:
        """Tokens after the first over the time after the first; 0 when there is none."""
        if completion_tokens <= 1 or not self.decode_ms:
            return 0.0
        return (completion_tokens - 1) * 1000.0 / self.decode_ms


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """Prefill has reached `done_tokens` of `total_tokens`; `queued` while it has not begun."""

    done_tokens: int
    total_tokens: int
    queued: bool = False


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs", tag_field="type"):
    """The prompt's tokens: the `first`, which nothing predicts, and the others' log-probabilities."""

    first: bytes
    tokens: tuple[TokenLogprobs, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """More of the answer."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """More of a reasoning span (`<think>` and its kin), without the markers."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call", tag_field="type"):
    """More of tool call `index`.

    The first delta of an index carries `id` and `name`; `arguments` is a JSON fragment.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


#: Events that a parser makes from an answer's text.
Parsed = TextDelta | ReasoningDelta | ToolCallDelta


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt and its answer, and the log-probability of each token of the answer.

    It is None for a token that a constraint or a spent budget forced. In a replay that ended at a token
    that differs, `replayed_logprob` is that of the token that was expected in its place.
    `irreproducible`: why another engine may get different tokens; "" if it cannot.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float | None, ...] = ()
    replayed_logprob: float | None = None
    irreproducible: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", tag_field="type"):
    """The end of a generation. `stop_sequence` is the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_sequence: str | None = None
    divergence: Divergence = Divergence()
    record: TokenRecord | None = None

    @property
    def is_cut_short(self) -> bool:
        """Return whether a limit of tokens or of time ended it."""
        return self.reason in ("length", "deadline")


Event = Progress | PromptLogprobs | TextDelta | ReasoningDelta | ToolCallDelta | Finished


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """A finished prompt: its cached tokens, and where it diverged from the prefix cache."""

    model: str
    usage: Usage
    divergence: Divergence

    @classmethod
    def of(cls, model: str, finished: Finished) -> CacheReport:
        """Report on the prompt of a finished generation."""
        return cls(model=model, usage=finished.usage, divergence=finished.divergence)

    @property
    def summary(self) -> str:
        """Say in one line how many tokens were cached, and why no more."""
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
                return f"{cached}; sharing off for that request"
        return cached


def _quote(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)  # a terminal may show it
    return f"“{' '.join(printable.split())}”"
