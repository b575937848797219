"""Decide how much prefill a step computes, and how long decode-only steps may delay a long prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance
from edgeinfer.runtime.scheduler.sequence import Sequence

#: While others decode, a chunk takes about this long (s), with at least `_CHUNK_MIN` tokens.
_CHUNK_S = 0.1
_CHUNK_MIN = 32
#: While no sequence decodes, prompts beyond `SHORT_TOKENS` have chunks of this length (tokens) on the
#: CPU, so that incoming requests start soon (decision 081). A chunk's size decides the rounding of
#: llama.cpp's kernels, so it must not depend on measured time.
IDLE_CHUNK_TOKENS = 128
#: Prompts up to this length are prefilled before longer ones.
SHORT_TOKENS = 256
#: Share of a long prefill's time for decode-only steps, and how much (s) is granted in advance.
_SHARE = 0.1
_AHEAD_S = 1.0


class ChunkSizer:
    """Learn the cost of prefill, `s_per_token` (s) at first, and size the next chunk."""

    def __init__(self, batch_invariance: BatchInvariance, s_per_token: float = 0.001) -> None:
        self._invariant_rows = batch_invariance.rows
        #: Length (tokens) of a long prompt's chunks while no sequence decodes.
        self.idle_chunk_tokens = IDLE_CHUNK_TOKENS
        #: Least length (tokens) of a chunk while other sequences decode.
        self.least_tokens = _CHUNK_MIN
        #: Recent cost (s) of a token of prefill.
        self.s_per_token = s_per_token
        #: Recent cost (s) per token of long prompts (their attention scans more cells), or None.
        self._long_s: float | None = None
        self._is_measured = False

    def measured_s(self, n_tokens: int) -> float:
        """Return about how long (s) a prefill of `n_tokens` takes; 0 before the first was measured."""
        return n_tokens * (self._long_s or self.s_per_token) if self._is_measured else 0.0

    def budget(self, room: int, n_decoding: int, pending: Tokens[int]) -> int:
        """Return how many prompt tokens a batch may take that has `room` left after `n_decoding`
        tokens.

        `pending` are the prompts' lengths. Short prompts stay together while they are bit-identical to
        unbatched ones.
        """
        longest = max(pending, default=0)
        budget = room
        if n_decoding:
            within = int(_CHUNK_S / (self._long_s or self.s_per_token))
            budget = min(room, max(self.least_tokens, within))
        elif longest > SHORT_TOKENS:
            budget = min(room, self.idle_chunk_tokens)
        invariant = self._invariant_rows - n_decoding
        return min(budget, invariant) if longest <= invariant else budget

    def note(self, n_tokens: int, seconds: float, *, is_long: bool) -> None:
        """Record `n_tokens` of prefill in `seconds`. Small batches do not predict large ones, and are
        ignored.
        """
        if n_tokens < _CHUNK_MIN:
            return
        took_s = seconds / n_tokens
        self._is_measured = True
        self.s_per_token = _moving_average(took_s, self.s_per_token)
        if is_long:
            self._long_s = _moving_average(took_s, self._long_s)


def _moving_average(measured: float, average: float | None) -> float:
    return measured if average is None else average + 0.3 * (measured - average)


def decode_budget_s(elapsed_s: float, rest_s: float) -> float:
    """Return how long (s) decode-only steps may delay this prefill: 10 % of the time spent on it, plus
    up to 1 s borrowed from the rest.
    """
    return _SHARE * elapsed_s + min(_SHARE * rest_s, _AHEAD_S)


class DecodeBudget:
    """Grant running streams decode-only steps during a long prefill.

    A short answer then ends within a few steps, instead of one token for each chunk of the long prompt.
    """

    def __init__(self, chunks: ChunkSizer) -> None:
        self._chunks = chunks
        self._delayed: Sequence | None = None
        self._began = 0.0

    def record(self) -> None:
        """Charge the last step to the prompt that it delayed, if it was decode-only."""
        if self._delayed is not None:
            self._delayed.delayed_s += time.monotonic() - self._began
            self._delayed = None

    def grant(self, seq: Sequence) -> bool:
        """Return whether the next step leaves out the long prompt of `seq`."""
        now = time.monotonic()
        rest_s = seq.n_pending * self._chunks.s_per_token
        if seq.delayed_s >= decode_budget_s(now - seq.clock.started, rest_s):
            return False
        self._delayed, self._began = seq, now
        return True
