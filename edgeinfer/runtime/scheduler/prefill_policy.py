"""Decide how many prompt tokens a step computes, and how long decode-only steps delay a long prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance
from edgeinfer.runtime.scheduler.sequence import Sequence

#: Target time (s) of a chunk while other sequences decode; it has at least `_CHUNK_MIN` tokens.
_CHUNK_S = 0.1
_CHUNK_MIN = 32
#: Chunk length (tokens) of prompts beyond `SHORT_TOKENS` on the CPU while no sequence decodes, so that
#: incoming requests start soon (decision 081). A chunk's size decides the rounding of llama.cpp's
#: kernels, so it must not depend on measured time.
IDLE_CHUNK_TOKENS = 128
#: Prompts up to this length are prefilled before longer ones.
SHORT_TOKENS = 256
#: Share of a long prefill's time for decode-only steps, and how much (s) is granted in advance.
_DECODE_SHARE = 0.1
_MAX_ADVANCE_S = 1.0


class ChunkSizer:
    """Learns the cost of prefill, at first `s_per_token` (s), and sizes the next chunk."""

    def __init__(self, batch_invariance: BatchInvariance, s_per_token: float = 0.001) -> None:
        self._max_invariant_tokens = batch_invariance.max_tokens
        #: Length (tokens) of a long prompt's chunks while no sequence decodes.
        self.idle_chunk_tokens = IDLE_CHUNK_TOKENS
        #: Minimum length (tokens) of a chunk while other sequences decode.
        self.least_tokens = _CHUNK_MIN
        #: Recent cost (s) of prefilling one token.
        self.s_per_token = s_per_token
        #: Recent cost (s) per token of long prompts, whose attention scans more cells; None before one
        #: was measured.
        self._long_s_per_token: float | None = None
        self._is_measured = False

    def estimate_prefill_s(self, n_tokens: int) -> float:
        """Estimate the time (s) of a prefill of `n_tokens`; 0 before the first measurement."""
        return n_tokens * (self._long_s_per_token or self.s_per_token) if self._is_measured else 0.0

    def token_budget(self, room: int, n_decoding: int, pending: Tokens[int]) -> int:
        """Return how many prompt tokens fit into a batch with `room` after its `n_decoding` tokens.

        `pending` are the prompts' lengths. Short prompts stay together while they are bit-identical to
        unbatched ones.
        """
        longest = max(pending, default=0)
        budget = room
        if n_decoding:
            in_time = int(_CHUNK_S / (self._long_s_per_token or self.s_per_token))
            budget = min(room, max(self.least_tokens, in_time))
        elif longest > SHORT_TOKENS:
            budget = min(room, self.idle_chunk_tokens)
        invariant = self._max_invariant_tokens - n_decoding
        return min(budget, invariant) if longest <= invariant else budget

    def record(self, n_tokens: int, seconds: float, *, is_long: bool) -> None:
        """Record a prefill of `n_tokens`, unless it is too small to predict large ones."""
        if n_tokens < _CHUNK_MIN:
            return
        s_per_token = seconds / n_tokens
        self._is_measured = True
        self.s_per_token = _moving_average(s_per_token, self.s_per_token)
        if is_long:
            self._long_s_per_token = _moving_average(s_per_token, self._long_s_per_token)


def _moving_average(measured: float, average: float | None) -> float:
    return measured if average is None else average + 0.3 * (measured - average)


def decode_budget_s(elapsed_s: float, remaining_s: float) -> float:
    """Return how long (s) decode-only steps may delay this prefill: 10 % of its time so far, plus up to
    1 s borrowed from the rest.
    """
    return _DECODE_SHARE * elapsed_s + min(_DECODE_SHARE * remaining_s, _MAX_ADVANCE_S)


class DecodeBudget:
    """Grants decode-only steps to running streams during a long prefill.

    So a short answer ends within a few steps, instead of getting one token per chunk of the prompt.
    """

    def __init__(self, chunk_sizer: ChunkSizer) -> None:
        self._chunk_sizer = chunk_sizer
        self._delayed: Sequence | None = None
        self._delayed_since = 0.0

    def charge_last_step(self) -> None:
        """Charge the last step to the prompt that it delayed, if it was decode-only."""
        if self._delayed is not None:
            self._delayed.delayed_s += time.monotonic() - self._delayed_since
            self._delayed = None

    def grant_step(self, seq: Sequence) -> bool:
        """Return whether the next step should be decode-only, which delays the long prompt of `seq`."""
        now = time.monotonic()
        remaining_s = seq.n_pending * self._chunk_sizer.s_per_token
        if seq.delayed_s >= decode_budget_s(now - seq.clock.prefill_start, remaining_s):
            return False
        self._delayed, self._delayed_since = seq, now
        return True
