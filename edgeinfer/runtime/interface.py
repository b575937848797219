"""The interface between the engine and its front ends, which import this module and never the engine.

Three engines implement it: `runtime.engine.LlamaEngine` (in this process),
`workers.remote_engine.RemoteEngine` (in a worker process) and `workers.replicas.ReplicatedEngine`
(several workers). Tests of front ends use a scripted one, `tests/made/fake_engine.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from edgeinfer.runtime.events import Event
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest


class Generation(Protocol):
    """A running request. Iterate over its events once, on a thread (`for`) or in a task (`async for`).

    A slow consumer does not delay other requests: its events are buffered.
    """

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Let `tap` handle events on the decode thread, without waking the task that iterates.

        `tap` is called with each event except the last while that task waits. If it returns True, the
        iteration does not yield the event.
        """

    def cancel(self) -> None:
        """End the request soon with `Finished(reason="cancelled")`. Thread-safe; idempotent."""


class Engine(Protocol):
    """A loaded model. Every method may be called on any thread."""

    @property
    def is_open(self) -> bool:
        """Return whether requests are accepted; False after `close` and after a crash."""

    def health(self) -> str:
        """Return the error that stopped the engine, "" while it is healthy. Does not block."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest) -> Generation:
        """Validate and queue a request, and return its generation.

        Raises InvalidRequestError, ContextLengthError, UnsupportedConstraintError, QueueFullError,
        EngineClosedError.
        """

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> bytes: ...

    def tokenize_chat(self, request: GenerateRequest) -> list[int]:
        """Return the prompt of a request with messages, as tokens. Raises InvalidRequestError."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return a vector of length 1 per text. Raises InvalidRequestError, ContextLengthError."""

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Score documents, better ones higher. Raises InvalidRequestError, ContextLengthError."""

    def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
        """Return the cached prefix of a coding agent's prompts ("claude-code"), [] if there is none.

        It has the tokens that the agent's sessions share, and those that followed in the latest
        session, as far as they are in the on-disk prefix cache under this `salt`.
        """

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Load these LoRA adapters, unload all others, and return the loaded ones.

        A changed file is read again. Waits for the end of requests that use an unloaded adapter. Raises
        InvalidRequestError, ModelLoadError; then nothing has changed.
        """

    def metrics(self) -> EngineMetrics: ...

    def close(self) -> None:
        """Cancel all requests and free the model. Idempotent."""


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that consists of several replicas of one model."""

    def replicas(self) -> ReplicasInfo:
        """Describe the running replicas, and the reason for their number."""
