"""Observers of requests: features that record what the decode loop does, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
from edgeinfer.runtime.events import Event, Finished, TokenRecord
from edgeinfer.runtime.requests import GenerateRequest


class SequenceObserver:
    """Observes one request, on the decode thread, before its client sees the result. Must not raise."""

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        """Read the logits of the next token, before a constraint changes them."""

    def on_token(self, token: int) -> None:
        """Record a token that was sampled, or forced by a constraint."""

    def on_event(self, event: Event) -> None:
        """Record a piece of the answer: text, reasoning, or a part of a tool call."""

    def on_end(self, last_event: Finished | EngineError, n_broken_calls: int) -> None:
        """Record the end; `n_broken_calls` of the answer's tool calls could not be parsed."""


class RequestObserver(Protocol):
    """A feature that observes the requests of an engine; `close` is called when the engine closes."""

    def on_admit(self, request: GenerateRequest) -> SequenceObserver:
        """Return the observer of a request that has entered the queue."""

    def close(self) -> None: ...


class TokenRecorder(SequenceObserver):
    """Records the tokens of one request with their log-probabilities."""

    def __init__(self, prompt: Sequence[int], replayed: Sequence[int] | None) -> None:
        self._prompt, self._replayed = tuple(prompt), replayed
        self._answer: list[int] = []
        self._logprobs: list[float | None] = []
        self._replayed_logprob: float | None = None
        self._logits: npt.NDArray[np.float32] | None = None
        self._log_sum = 0.0
        self.differs = False
        #: Returns why another engine may get different tokens, "" if it cannot; set by the engine.
        self.why_irreproducible: Callable[[], str] = str

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        # copy the logits, which a constraint will change
        self._logits = logits if self._replayed is None else logits.copy()
        self._log_sum = log_sum(logits)

    def on_token(self, token: int) -> None:
        n, logits = len(self._answer), self._logits
        self._answer.append(token)
        self._logits = None
        # a constraint's mask has changed other logits, but not this token's
        self._logprobs.append(None if logits is None else float(logits[token]) - self._log_sum)
        if self._replayed is None:
            return
        expected = self._replayed[n] if n < len(self._replayed) else None
        self.differs = token != expected
        if self.differs and logits is not None and expected is not None:
            self._replayed_logprob = float(logits[expected]) - self._log_sum

    def record(self) -> TokenRecord:
        return TokenRecord(
            prompt=self._prompt,
            answer=tuple(self._answer),
            logprobs=tuple(self._logprobs),
            replayed_logprob=self._replayed_logprob,
            irreproducible=self.why_irreproducible(),
        )


def log_sum(logits: npt.NDArray[np.float32]) -> float:
    """Return the logarithm of the sum of the exponentials."""
    peak = logits.max()
    return float(peak + np.log(np.exp(logits - peak).sum()))
