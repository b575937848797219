"""Has long prompts computed in another context, on a device, and takes what it has computed over.

The sequence waits meanwhile as one does whose blocks come from the disk, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from edgeinfer.runtime.decoding.blocks.restore import Piece, Restore
from edgeinfer.runtime.decoding.cache.kvcache import KvCache, Resident
from edgeinfer.runtime.decoding.scheduling.chunks import SHORT_TOKENS
from edgeinfer.runtime.decoding.sequences.sequence import Sequence

#: Pieces are put into sequences for so long in a step (seconds).
_TAKING_S = 0.02
#: A step that could only wait for a piece waits so long (seconds).
_WAIT_S = 0.02


class Reader(Protocol):
    """Computes prompts in a context of its own.

    `failure` says why it computes no more, "" while it does.
    """

    failure: str

    def begin(self, resident: Resident, tokens: list[int]) -> Restore[Piece] | None:
        """Begin to compute what `tokens` has beyond `resident`, but the last; None when it can't."""

    def put(self, resident: Resident, piece: Piece) -> bool:
        """Put a piece behind what `resident` has. False when there was no room."""


class Readings:
    """Hands prompts of more than 256 tokens to `reader`; there is none at first.

    `on_lost` is told why it computes no more. One thread.
    """

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self.reader: Reader | None = None
        self.on_lost: Callable[[str], None] = lambda failure: None

    def work(self, running: list[Sequence]) -> None:
        """Take what has been computed, for a while, and hand over what is there to be."""
        if self.reader is None:
            return
        until = time.monotonic() + _TAKING_S
        for seq in running:
            while seq.reading is not None and seq.reading.is_ready and time.monotonic() < until:
                self._take(seq, seq.reading, self.reader)
            if self._is_for(seq) and seq.resident is not None:
                seq.was_read = True
                seq.reading = self.reader.begin(seq.resident, seq.tokens)
        if self.reader.failure:
            failure, self.reader = self.reader.failure, None
            for seq in running:
                self.end(seq)
            self.on_lost(failure)

    def _is_for(self, seq: Sequence) -> bool:
        """Whether a prompt is computed elsewhere: once, without adapters, and only for its answer."""
        is_waiting = seq.resident is None or seq.restore is not None
        is_here = seq.was_read or seq.adapters or seq.request.prompt_logprobs is not None
        return not (is_waiting or is_here) and seq.n_pending > SHORT_TOKENS

    def _take(self, seq: Sequence, reading: Restore[Piece], reader: Reader) -> None:
        piece = reading.take()
        assert seq.resident is not None
        is_there = piece is not None and self._kv.make_room(len(piece.tokens))
        if piece is None or not is_there or not reader.put(seq.resident, piece):
            self.end(seq)
            return
        self._kv.extend(seq.resident, piece.tokens)
        seq.progress()
        if reading.is_over:
            seq.reading = None

    def end(self, seq: Sequence) -> None:
        """Wait for no more of a prompt: the rest is computed here, or not at all."""
        if seq.reading is not None:
            seq.reading.cancel()
            seq.reading = None

    def wait(self, running: list[Sequence]) -> None:
        """Nothing can be computed now: wait for a piece, if one is on its way."""
        waiting = [seq.reading for seq in running if seq.reading is not None]
        if waiting:
            waiting[0].wait(_WAIT_S)
