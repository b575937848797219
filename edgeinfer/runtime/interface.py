"""The engine's interface for front ends: they import this module, never an implementation.

Three engines implement it: `runtime.engine.LlamaEngine` (in this process),
`workers.remote_engine.RemoteEngine` (in a worker process) and `workers.replicas.ReplicatedEngine`
(several workers). Tests of front ends use a scripted engine, `tests/made/fake_engine.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from edgeinfer.runtime.events import Event
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest


class Generation(Protocol):
    """A running request. Iterate over its events once, on a thread (`for`) or in a task (`async for`).

    Events are buffered, so a slow consumer does not delay other requests.
    """

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Let `tap` handle events on the decode thread, without waking the task that iterates.

        While that task waits, `tap` is called with each event except the last one. If `tap` returns
        True, the iteration does not yield that event. None removes the tap.
        """

    def cancel(self) -> None:
        """End the request soon with `Finished(reason="cancelled")`. Thread-safe; idempotent."""


class Engine(Protocol):
    """A loaded model. Every method may be called on any thread."""

    @property
    def is_open(self) -> bool:
        """Return whether the engine accepts requests: not after `close`, nor after a crash."""

    def health(self) -> str:
        """Return the error that stopped the engine, "" if there was none. Does not block."""

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
        """Return a vector per text, normalized to the Euclidean length 1.

        Raises InvalidRequestError, or ContextLengthError for a text that is too long.
        """

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return a score per document, higher for a better match.

        Raises InvalidRequestError, or ContextLengthError if `query` plus a document is too long.
        """

    def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
        """Return the cached prefix of a coding agent's prompts ("claude-code"), [] if there is none.

        The prefix has the tokens that all sessions of the agent share, then those of its latest
        session, as far as the on-disk prefix cache has them for this `salt`.
        """

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Load these LoRA adapters, unload all others, and return the loaded ones.

        Changed files are read again. Waits for requests that use a removed adapter. After an
        InvalidRequestError or ModelLoadError, the loaded adapters are the same as before.
        """

    def metrics(self) -> EngineMetrics: ...

    def close(self) -> None:
        """Cancel all requests and free the model. Idempotent."""


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that consists of several replicas of one model."""

    def replicas(self) -> ReplicasInfo:
        """Describe the running replicas, and why there are that many."""
