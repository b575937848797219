"""Compute log(sum(exp(logits))), by which logits become log-probabilities. Needs no llama.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class LogSum:
    """Computes log(sum(exp(logits))). Allocating its memory for each row takes 4 % of a 135M's step."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def __call__(self, logits: npt.NDArray[np.float32]) -> float:
        if len(self._buffer) != len(logits):
            self._buffer = np.empty_like(logits)
        peak = logits.max()
        np.exp(np.subtract(logits, peak, out=self._buffer), out=self._buffer)
        return float(peak + np.log(self._buffer.sum()))
