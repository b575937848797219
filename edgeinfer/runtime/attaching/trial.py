"""Measures whether a model is faster on devices: a trial of at most two seconds, the first time.

Integrated GPUs often lose to the CPU beside them, and nothing but measuring tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.attaching.remembered import Rates
from edgeinfer.runtime.attaching.target import move_state
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.libllama import L

#: A side computes so many tokens of a prompt, and then so many one by one, but no longer (seconds).
_PROMPT, _ANSWER = 64, 16
_SIDE_S = 1.0

#: Runs work between two steps, or just runs it.
Call = Callable[[Callable[[], float]], float]


class Probe:
    """Computes a sequence of its own in a context that others use only between its calls of `call`."""

    def __init__(self, active: ActiveContext, batch: Batch, call: Call) -> None:
        self._active, self._batch = active, batch
        self._call = call
        self._prompt = list(range(1, 1 + min(_PROMPT, batch.capacity)))

    def warm_up(self) -> None:
        """Have a device compile what a prompt and an answer need. Raises DecodeError."""
        self._read()
        self._write(0)
        self._forget()

    def measure(self) -> Rates:
        """Compute a prompt and an answer once that is done. Raises DecodeError."""
        self.warm_up()
        read_s = self._read()
        written_s, written = 0.0, 0
        while not written or (written < _ANSWER and read_s + written_s < _SIDE_S):
            written_s += self._write(written)
            written += 1
        self._forget()
        n_read = len(self._prompt)
        return Rates(prefill=n_read / max(1e-9, read_s), decode=written / max(1e-9, written_s))

    def with_answers_of(self, other: Probe, own: Rates, others: Rates) -> Rates:
        """The rates of reading here and writing there, where each alone has its own.

        Raises DecodeError.
        """
        self._read()
        moved_s = other._call(lambda: self._moved(other))
        self._forget()
        other._forget()
        n_read = len(self._prompt)
        return Rates(prefill=n_read / (n_read / own.prefill + moved_s), decode=others.decode)

    def _moved(self, other: Probe) -> float:
        began = time.perf_counter()
        if not move_state(self._active, other._active):
            raise DecodeError("what a device has computed could not be moved to the CPU")
        return time.perf_counter() - began

    def _read(self) -> float:
        return self._call(lambda: self._step(self._prompt, 0))

    def _write(self, n_before: int) -> float:
        return self._call(lambda: self._step(self._prompt[:1], len(self._prompt) + n_before))

    def _forget(self) -> None:
        self._call(lambda: float(L.llama_memory_seq_rm(self._active.memory, 0, -1, -1)))

    def _step(self, tokens: Sequence[int], at: int) -> float:
        """Seconds that these tokens took."""
        began = time.perf_counter()
        self._batch.clear()
        self._batch.add(tokens, at, 0, outputs=1)
        if code := self._batch.decode(self._active):
            raise DecodeError(f"llama_decode returned {code} for {len(tokens)} tokens")
        return time.perf_counter() - began
