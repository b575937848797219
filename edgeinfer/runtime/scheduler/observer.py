"""Observers of requests: features that record what the decode loop does, and change nothing of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
from edgeinfer.runtime.events import Event, Finished
from edgeinfer.runtime.requests import GenerateRequest


class SequenceObserver:
    """One request, seen on the decode thread before its client sees it. A method must not raise."""

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        """Read the logits of the next token, before a constraint changes them."""

    def on_token(self, token: int) -> None:
        """Take note of a token that was sampled, or forced by a constraint."""

    def on_event(self, event: Event) -> None:
        """Take note of a piece of the answer: text, reasoning, or a part of a tool call."""

    def on_end(self, end: Finished | EngineError, n_broken_calls: int) -> None:
        """Take note of the end; `n_broken_calls` of the answer's tool calls could not be parsed."""


class RequestObserver(Protocol):
    """A feature that observes the requests of an engine; `close` is called when the engine closes."""

    def on_admit(self, request: GenerateRequest) -> SequenceObserver:
        """Observe a request that has entered the queue."""

    def close(self) -> None: ...
