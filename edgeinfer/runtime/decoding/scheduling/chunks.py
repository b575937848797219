"""How much of the waiting prompts a step computes: enough to be efficient, not so much that running
streams stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: While others decode, a chunk of prefill is held to about this long (seconds), and to at least so many
#: tokens.
_CHUNK_S = 0.1
_CHUNK_MIN = 32
#: From this many tokens on attention is computed in tiles; a chunk is stretched to one when that takes
#: no longer (seconds), or hardly longer than a smaller chunk: so it is in a deep cache (decision 020).
_TILE = 64
_TILE_S = 0.3
_HARDLY_LONGER = 1.5
#: While nobody decodes, a prompt longer than `SHORT_TOKENS` is computed in pieces of this length, for
#: those who may come: 128 at a time give 95 % of the rate that 512 give. Not by time: the size decides
#: bits.
_ALONE = 128
#: A prompt that is computed before longer ones, whoever came first.
SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Exactness:
    """Up to what a step in company computes the very bits that one alone does (decision 022).

    `rows`: tokens in the batch, beyond which llama.cpp's kernels round otherwise. `cells`: used cells,
    beyond which a lone token's attention does; None for no such bound.
    """

    rows: int
    cells: int | None


class Chunks:
    """Learns what a token of prefill costs, and says how many fit into the next step."""

    def __init__(self, exactness: Exactness) -> None:
        self._exact_rows = exactness.rows
        self._s_per_token = 0.001
        #: The same for a long prompt's chunks below a tile, and from one on; None before there was one.
        self._small_s: float | None = None
        self._tiled_s: float | None = None

    @property
    def s_per_token(self) -> float:
        """Seconds a token of prefill has taken lately."""
        return self._s_per_token

    def budget(self, room: int, n_decoding: int, pending: Sequence[int]) -> int:
        """Tokens of prompts for a batch that has `room` left beside `n_decoding` tokens; `pending` are
        the prompts' lengths.

        Short prompts stay together where each gives the bits that it gives alone; a long one gets what
        is there.
        """
        longest = max(pending, default=0)
        budget = room
        if n_decoding:
            budget = min(room, self._beside_decoding(n_decoding))
        elif longest > SHORT_TOKENS:
            budget = min(room, _ALONE)
        exact = self._exact_rows - n_decoding
        return min(budget, exact) if longest <= exact else budget

    def _beside_decoding(self, n_decoding: int) -> int:
        tiled_s = self._tiled_s or self._s_per_token
        within = int(_CHUNK_S / tiled_s)
        if within >= _TILE:
            return within
        small_s = self._small_s or tiled_s
        smaller = max(_CHUNK_MIN, int(_CHUNK_S / small_s))
        if _TILE * tiled_s <= max(_TILE_S, _HARDLY_LONGER * smaller * small_s):
            # the rows that decode in the same tile: a second one takes as long as the first
            return max(_TILE - n_decoding, _CHUNK_MIN)
        return smaller

    def note(self, n_tokens: int, seconds: float, *, n_decoding: int, is_long: bool) -> None:
        """So many tokens of prefill, of a long prompt or not, took so long beside those that decode.
        Few say little about many.
        """
        if n_tokens < _CHUNK_MIN:
            return
        took_s = seconds / n_tokens
        self._s_per_token = _towards(took_s, self._s_per_token)
        if not is_long:
            return
        if n_tokens + n_decoding < _TILE:
            self._small_s = _towards(took_s, self._small_s)
            return
        before_s, self._tiled_s = self._tiled_s, _towards(took_s, self._tiled_s)
        if (
            before_s and self._small_s
        ):  # a deeper cache makes smaller chunks slower too, at least as much
            self._small_s *= self._tiled_s / before_s


def _towards(found: float, known: float | None) -> float:
    """A mean that follows what was found lately."""
    return found if known is None else known + 0.3 * (found - known)
