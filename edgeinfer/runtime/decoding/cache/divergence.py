"""Says where a prompt stops agreeing with what is remembered, and what stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey, Resident, common_prefix
from edgeinfer.runtime.events import Divergence

#: Tokens of text on each side.
_AROUND = 12


@dataclass(frozen=True, slots=True)
class Closest:
    """What memory has closest to a prompt: `n` tokens agree, and `there` is what it goes on with."""

    n: int = 0
    there: tuple[int, ...] = ()


def closest(
    residents: Iterable[Resident], tokens: Sequence[int], adapters: AdapterKey, salt: str
) -> Closest:
    """Find what agrees longest with `tokens` among what its request may see.

    A pinned prompt is shared with every client, but its text is shown to none.
    """
    best = Closest()
    for resident in residents:
        if not resident.serves(adapters, salt):
            continue
        n = common_prefix(resident.tokens, tokens)
        if n > best.n:
            there = () if resident.pinned else tuple(resident.tokens[n : n + _AROUND])
            best = Closest(n, there)
    return best


def describe_divergence(
    prompt: Sequence[int], found: Closest, cached: int, detokenize: Callable[[Sequence[int]], bytes]
) -> Divergence:
    """Describe where `prompt`, of which `cached` tokens were remembered, goes a way of its own."""
    at = max(found.n, cached)
    if at >= len(prompt) - 1:
        return Divergence(n_tokens=len(prompt), cause="none")
    there = found.there if at == found.n else ()
    cause: Literal["text", "end", "nothing"] = "text" if there else "end"
    if not at:
        cause = "nothing"

    def text(tokens: Sequence[int]) -> str:
        return detokenize(tokens).decode("utf-8", "replace")

    return Divergence(
        n_tokens=at,
        cause=cause,
        before=text(prompt[max(0, at - _AROUND) : at]),
        here=text(prompt[at : at + _AROUND]),
        there=text(there),
    )
