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
    """A running request. Iterate it once, from one thread (`for`) or one task (`async for`).

    Events for a slow consumer are buffered, at most those of `max_tokens`; other requests continue.
    """

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Offer every event but the last to `tap` on the thread that made it.

        `tap` is called only while the iterating task waits for an event. Events for which it returns
        True are not iterated, and do not wake the task.
        """

    def cancel(self) -> None:
        """End it soon with `Finished(reason="cancelled")`. Usable on any thread; idempotent."""


class Engine(Protocol):
    """A loaded model. Every method may be called on any thread."""

    @property
    def is_open(self) -> bool:
        """Return whether requests are accepted: the engine is open, its process or thread alive."""

    def health(self) -> str:
        """Return the error that stopped the engine, "" while healthy. Does not block."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest) -> Generation:
        """Validate and queue a request; if this raises, nothing is computed.

        Raises InvalidRequestError, ContextLengthError, UnsupportedConstraintError, QueueFullError,
        EngineClosedError.
        """

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> bytes: ...

    def apply_template(self, request: GenerateRequest) -> str:
        """Render a request's messages with the model's chat template. Raises InvalidRequestError."""

    def tokenize_chat(self, request: GenerateRequest) -> list[int]:
        """Tokenize that prompt as `submit` does: text of messages never becomes a control token."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return an L2-normalised vector per text. Raises InvalidRequestError for other models."""

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Score each document. Raises InvalidRequestError if the model has no reranking head."""

    def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
        """Return the tokens that sessions of `agent` share, and those after them in the latest session.

        Only tokens on disk under this `salt` count; [] without any.
        """

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Load these LoRA adapters, unload all others, and return `info.lora`.

        A changed file is read again. Waits until requests with an unloaded adapter have ended. Changes
        nothing if it raises: InvalidRequestError, ModelLoadError.
        """

    def metrics(self) -> EngineMetrics: ...

    def close(self) -> None:
        """Cancel all requests and free the model. Idempotent."""


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that consists of several replicas of one model."""

    def replicas(self) -> ReplicasInfo:
        """Describe the running replicas, and the reason for their number."""
