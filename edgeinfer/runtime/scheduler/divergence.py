"""Find where a prompt differs from the cached sequences, to tell the user why it was not cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from edgeinfer.runtime.events import Divergence
from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence, common_prefix
from edgeinfer.runtime.prompt_tokens import text_only

#: Number of tokens that are shown before and after the place where a prompt differs from the cache.
_EXCERPT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class LongestMatch:
    """The cached sequence most similar to a prompt: `n` equal tokens, then its `continuation`."""

    n: int = 0
    continuation: tuple[int, ...] = ()


def find_longest_match(
    cached_sequences: Iterable[CachedSequence], tokens: Sequence[int], adapters: AdapterKey, salt: str
) -> LongestMatch:
    """Find the sequence with the longest common prefix, among those that the request may reuse.

    The result has no continuation for a pinned prompt, whose text may not be the client's.
    """
    reusable = [c for c in cached_sequences if c.is_reusable_with(adapters, salt)]
    matches = ((common_prefix(c.tokens, tokens), c) for c in reusable)
    n, longest = max(matches, key=itemgetter(0), default=(0, None))
    if not n or longest is None or longest.pinned:
        return LongestMatch(n)
    return LongestMatch(n, tuple(longest.tokens[n : n + _EXCERPT_TOKENS]))


def describe_divergence(
    prompt: Sequence[int],
    best: LongestMatch,
    n_cached: int,
    detokenize: Callable[[Sequence[int]], bytes],
) -> Divergence:
    """Describe where `prompt` differs from the cache; `n_cached` prompt tokens were reused."""
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
