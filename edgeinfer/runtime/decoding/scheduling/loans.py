"""Lets running streams decode without a piece of a long prompt beside them, for a small share of its
time.

A short answer is over before the long prompt has noticed, and is not stretched over many of its pieces,
which have to be small while others decode and are slower for that.
"""

from __future__ import annotations

import time

from edgeinfer.runtime.decoding.scheduling.chunks import Chunks
from edgeinfer.runtime.decoding.sequences.sequence import Sequence

#: The share of a long prompt's time that it lends, and how far ahead of it (seconds).
_SHARE = 0.1
_AHEAD_S = 1.0


def lendable_s(elapsed_s: float, rest_s: float) -> float:
    """Seconds that a prompt may have lent, which has been computed for `elapsed_s` and will be for
    `rest_s`.
    """
    return _SHARE * elapsed_s + min(_SHARE * rest_s, _AHEAD_S)


class Loans:
    """Books on each long prompt what it has lent. `chunks` knows what computing its rest costs."""

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
