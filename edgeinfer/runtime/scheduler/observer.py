"""Observers, which record requests without changing them: interfaces, and one for receipts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
from edgeinfer.runtime.events import Event, Finished, TokenRecord
from edgeinfer.runtime.options import Adapter
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.logprobs import LogSum


class SequenceObserver:
    """Observes one request on the decode thread, before the client gets an event. Must not raise."""

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        """Handle the logits of the next token, before constraints mask them."""

    def on_token(self, token: int) -> None:
        """Handle a token that was sampled, or forced by a constraint."""

    def on_event(self, event: Event) -> None:
        """Handle a part of the answer: text, reasoning, or a part of a tool call."""

    def on_end(self, last_event: Finished | EngineError, n_broken_calls: int) -> None:
        """Handle the end. `n_broken_calls`: number of tool calls that could not be parsed."""


class RequestObserver(Protocol):
    """Observes all requests of an engine. The engine's `close` calls the observer's `close`."""

    def on_admit(self, request: GenerateRequest) -> SequenceObserver:
        """Return an observer for a request that is now put into the queue."""

    def close(self) -> None: ...


class TokenRecorder(SequenceObserver):
    """Records tokens and log-probabilities of one answer, for receipts.

    In a replay, also compares the tokens with those of the earlier answer, `replayed`.
    """

    def __init__(self, prompt: Sequence[int], replayed: Sequence[int] | None) -> None:
        self._prompt = tuple(prompt)
        self._replayed = None if replayed is None else tuple(replayed)
        self._answer: list[int] = []
        self._logprobs: list[float | None] = []
        #: Log-probability of the replayed answer's token if the sampled token differs, otherwise None.
        self._replayed_logprob: float | None = None
        self._logits: npt.NDArray[np.float32] | None = None
        self._log_sum, self._log_sum_of = 0.0, LogSum()
        self.differs = False
        #: LoRA adapters of the request, which the engine sets.
        self.adapters: tuple[Adapter, ...] = ()
        #: The engine's function: returns why another engine may choose other tokens, "" if none may.
        self.why_irreproducible: Callable[[], str] = str

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        self._logits, self._log_sum = logits, self._log_sum_of(logits)
        for expected in self._next_token:  # record now: a constraint may mask this logit later
            self._replayed_logprob = float(logits[expected]) - self._log_sum

    def on_token(self, token: int) -> None:
        logits, self._logits = self._logits, None
        # a constraint may have masked logits after `on_logits`, but not the sampled token's logit
        self._logprobs.append(None if logits is None else float(logits[token]) - self._log_sum)
        self.differs = self._replayed is not None and self._next_token != (token,)
        if not self.differs:
            self._replayed_logprob = None
        self._answer.append(token)

    @property
    def _next_token(self) -> tuple[int, ...]:
        """The next token of the replayed answer; () at its end or without a replay."""
        n = len(self._answer)
        return (self._replayed or ())[n : n + 1]

    def record(self) -> TokenRecord:
        return TokenRecord(
            prompt=self._prompt,
            answer=tuple(self._answer),
            logprobs=tuple(self._logprobs),
            adapters=self.adapters,
            replayed_logprob=self._replayed_logprob,
            irreproducible=self.why_irreproducible(),
        )
