"""Find where a prompt diverges from the cached sequences, for its cache report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgeinfer.runtime.events import Divergence
from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence, common_prefix
from edgeinfer.runtime.prompt_tokens import text_only

#: Tokens of text that a cache report shows on each side of a divergence.
_EXCERPT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class LongestMatch:
    """The longest match of a prompt: `n` tokens are cached, then the cache has `continuation`."""

    n: int = 0
    continuation: tuple[int, ...] = ()


def find_longest_match(
    cached_sequences: Iterable[CachedSequence], tokens: Sequence[int], adapters: AdapterKey, salt: str
) -> LongestMatch:
    """Find the longest match of `tokens` among the sequences that its request may reuse.

    All clients share a pinned prompt, but cache reports never show its text.
    """
    best = LongestMatch()
    for cached_seq in cached_sequences:
        if not cached_seq.is_reusable_with(adapters, salt):
            continue
        n = common_prefix(cached_seq.tokens, tokens)
        if n > best.n:
            continuation = (
                () if cached_seq.pinned else tuple(cached_seq.tokens[n : n + _EXCERPT_TOKENS])
            )
            best = LongestMatch(n, continuation)
    return best


def describe_divergence(
    prompt: Sequence[int],
    best: LongestMatch,
    n_cached: int,
    detokenize: Callable[[Sequence[int]], bytes],
) -> Divergence:
    """Describe where `prompt`, of which `n_cached` tokens were cached, diverges from the cache."""
    n_agree = max(best.n, n_cached)
    if n_agree >= len(prompt) - 1:
        return Divergence(n_tokens=len(prompt), cause="none")
    continuation = best.continuation if n_agree == best.n else ()
    cause: Literal["text", "end", "nothing"] = "text" if continuation else "end"
    if not n_agree:
        cause = "nothing"

    def text(tokens: Sequence[int]) -> str:
        return detokenize(text_only(tokens)).decode("utf-8", "replace")

    return Divergence(
        n_tokens=n_agree,
        cause=cause,
        before=text(prompt[max(0, n_agree - _EXCERPT_TOKENS) : n_agree]),
        here=text(prompt[n_agree : n_agree + _EXCERPT_TOKENS]),
        there=text(continuation),
    )
