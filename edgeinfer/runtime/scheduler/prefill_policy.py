"""How much prefill a step computes, and for how long decode-only steps may delay a long prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from edgeinfer.runtime.scheduler.sequence import Sequence

#: While others decode, a chunk of prefill is held to about this long (seconds), and to at least so many
#: tokens.
_CHUNK_S = 0.1
_CHUNK_MIN = 32
#: While nobody decodes, a prompt longer than `SHORT_TOKENS` is computed in pieces of this length, for
#: those who may come (decision 081). Not by time: with repacked weights the size decides bits.
_ALONE = 128
#: A prompt that is computed before longer ones, whoever came first.
SHORT_TOKENS = 256
#: The share of a long prompt's time that it lends, and how far ahead of it (seconds).
_SHARE = 0.1
_AHEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Exactness:
    """Up to what a step in company computes the very bits that one alone does (decision 022).

    `rows`: tokens in the batch, beyond which kernels round otherwise. `cells`: used cells, beyond which
    a lone token's attention does; None for no such bound.
    """

    rows: int
    cells: int | None


class Chunks:
    """Learns what a token of prefill costs, and says how many fit into the next step.

    `s_per_token` is what it is taken for (seconds) before any was computed.
    """

    def __init__(self, exactness: Exactness, s_per_token: float = 0.001) -> None:
        self._exact_rows = exactness.rows
        self._s_per_token = s_per_token
        #: The same for long prompts, which attend to more; None before there was one.
        self._long_s: float | None = None

    @property
    def s_per_token(self) -> float:
        """Seconds a token of prefill has taken lately."""
        return self._s_per_token

    def budget(self, room: int, n_decoding: int, pending: Tokens[int]) -> int:
        """Tokens of prompts, `pending` long, for a batch with `room` left beside `n_decoding` tokens.

        Short prompts stay together where each gives the bits that it gives alone.
        """
        longest = max(pending, default=0)
        budget = room
        if n_decoding:
            within = int(_CHUNK_S / (self._long_s or self._s_per_token))
            budget = min(room, max(_CHUNK_MIN, within))
        elif longest > SHORT_TOKENS:
            budget = min(room, _ALONE)
        exact = self._exact_rows - n_decoding
        return min(budget, exact) if longest <= exact else budget

    def note(self, n_tokens: int, seconds: float, *, is_long: bool) -> None:
        """Learn that so many tokens of prefill took so long. Few say little about many."""
        if n_tokens < _CHUNK_MIN:
            return
        took_s = seconds / n_tokens
        self._s_per_token = _towards(took_s, self._s_per_token)
        if is_long:
            self._long_s = _towards(took_s, self._long_s)


def _towards(found: float, known: float | None) -> float:
    return found if known is None else known + 0.3 * (found - known)


def lendable_s(elapsed_s: float, rest_s: float) -> float:
    """Seconds that a prompt computed for `elapsed_s`, with `rest_s` to come, may have lent."""
    return _SHARE * elapsed_s + min(_SHARE * rest_s, _AHEAD_S)


class Loans:
    """Lets running streams decode without a piece of a long prompt beside them, now and then.

    A short answer is over before the long prompt has noticed, and is not stretched over many of its
    pieces, which are small while others decode. `chunks` knows what computing its rest costs.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._lender: Sequence | None = None
        self._began = 0.0

    def settle(self) -> None:
        """A step is over: book it, if it was lent."""
        if self._lender is not None:
            self._lender.lent_s += time.monotonic() - self._began
            self._lender = None

    def lend(self, seq: Sequence) -> bool:
        """Whether the next step is lent by the long prompt of `seq`."""
        now = time.monotonic()
        rest_s = seq.n_pending * self._chunks.s_per_token
        if seq.lent_s >= lendable_s(now - seq.clock.started, rest_s):
            return False
        self._lender, self._began = seq, now
        return True
