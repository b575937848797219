"""Decide how many prompt tokens a step has, and how many steps only decode during a long prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance
from edgeinfer.runtime.scheduler.sequence import Sequence

#: While other sequences decode, a prefill chunk should take this time (s), but has at least 32 tokens.
_CHUNK_S = 0.1
_CHUNK_MIN = 32
#: Chunk length (tokens) of long prompts on the CPU while no sequence decodes, short enough that
#: incoming requests start soon (decision 081). It does not depend on measured time, because llama.cpp's
#: kernels round differently by chunk length.
IDLE_CHUNK_TOKENS = 128
#: Prompts up to this length (tokens) are short; they are prefilled before long ones.
SHORT_TOKENS = 256
#: Decode-only steps may delay a prefill by this share of the time that it has taken so far. The delay
#: for the remaining time is allowed in advance, up to `_MAX_ADVANCE_S`.
_DECODE_SHARE = 0.1
_MAX_ADVANCE_S = 1.0


class ChunkSizer:
    """Measures the time of prefill, and decides how long the next chunk of a prompt is.

    `s_per_token` is the time (s) per token that is assumed at first.
    """

    def __init__(self, batch_invariance: BatchInvariance, s_per_token: float = 0.001) -> None:
        self._max_invariant_tokens = batch_invariance.max_tokens
        #: Chunk length (tokens) of long prompts while no sequence decodes.
        self.idle_chunk_tokens = IDLE_CHUNK_TOKENS
        #: Shortest chunk (tokens) while other sequences decode.
        self.least_tokens = _CHUNK_MIN
        #: Recent time (s) of prefilling one token.
        self.s_per_token = s_per_token
        #: Time (s) per token of long prompts, whose attention scans more cells; None if not measured.
        self._long_s_per_token: float | None = None
        self._is_measured = False

    def estimate_prefill_s(self, n_tokens: int) -> float:
        """Estimate how long (s) prefill of `n_tokens` takes; 0 before the first measurement."""
        return n_tokens * (self._long_s_per_token or self.s_per_token) if self._is_measured else 0.0

    def token_budget(self, room: int, n_decoding: int, pending: Tokens[int]) -> int:
        """Return how many prompt tokens to add to a batch with `n_decoding` tokens of decodes.

        The batch has space for `room` more tokens. `pending` has the number of tokens left of each
        prompt. If all prompts are short, the batch stays small, so that the results equal those of
        unbatched prefill.
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
        """Record how long a prefill of `n_tokens` took. Fewer than 32 tokens are ignored.

        `is_long`: some of these tokens belong to a prompt of more than `SHORT_TOKENS` tokens.
        """
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
    """Return how long (s) decode-only steps may have delayed a prefill so far.

    That is 10 % of the prefill's time so far (`elapsed_s`), plus the smaller of 10 % of `remaining_s`
    and 1 s.
    """
    return _DECODE_SHARE * elapsed_s + min(_DECODE_SHARE * remaining_s, _MAX_ADVANCE_S)


class DecodeBudget:
    """Grants steps without prompt tokens to decoding sequences during a long prefill.

    So each sequence gets more than one token per chunk of the long prompt.
    """

    def __init__(self, chunk_sizer: ChunkSizer) -> None:
        self._chunk_sizer = chunk_sizer
        self._delayed: Sequence | None = None
        self._delayed_since = 0.0

    def charge_last_step(self) -> None:
        """Add the last step's time to `delayed_s` of the sequence whose prefill it delayed, if any."""
        if self._delayed is not None:
            self._delayed.delayed_s += time.monotonic() - self._delayed_since
            self._delayed = None

    def grant_step(self, seq: Sequence) -> bool:
        """Return whether the next step should only decode, and so delay the long prompt of `seq`."""
        now = time.monotonic()
        remaining_s = seq.n_pending * self._chunk_sizer.s_per_token
        if seq.delayed_s >= decode_budget_s(now - seq.clock.prefill_start, remaining_s):
            return False
        self._delayed, self._delayed_since = seq, now
        return True
