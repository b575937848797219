"""The seam between the engine and its fronts. Fronts import this, never the engine.

Four things stand behind it: `runtime.engine.LlamaEngine` (in this process),
`workers.remote_engine.RemoteEngine` (in a worker process), `workers.replicas.ReplicatedEngine`
(several of those), and `runtime.fake.FakeEngine` (scripted, for tests of the fronts).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from edgeinfer.runtime.events import Event
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool


class Generation(Protocol):
    """A running request. Iterate it once, from one thread (`for`) or one task (`async for`).

    A consumer that falls behind is buffered without bound on text owed by `max_tokens`; it stops no
    others.
    """

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Offer every event but the last to `tap` on the thread that made it.

        Only while the task that iterates waits for the next one. What `tap` takes, returning True, is
        not iterated, and the task is not woken for it.
        """

    def cancel(self) -> None:
        """End it soon with `Finished(reason="cancelled")`, from any thread; idempotent."""


class Engine(Protocol):
    """A loaded model. Every method may be called from any thread."""

    @property
    def is_open(self) -> bool:
        """Tell if requests are accepted: not closed, and its process or thread is alive."""

    def health(self) -> str:
        """Return why no request is answered any more, "" while healthy. Returns at once."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest) -> Generation:
        """Validate and queue; nothing is computed when it raises.

        Raises InvalidRequestError, ContextLengthError, UnsupportedConstraintError, QueueFullError,
        EngineClosedError.
        """

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> bytes: ...

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> str:
        """The prompt the model's chat template makes of `messages`, with the generation prompt.

        `options` are variables for the template. Raises InvalidRequestError.
        """

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """Tokenize that prompt, as `submit` does: what messages say becomes no control token."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """One L2-normalised vector a text. Raises InvalidRequestError when the model cannot."""

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Score each document. Raises InvalidRequestError when the model has no such head."""

    def begun_with(self, agent: str, salt: str = "") -> list[int]:
        """The tokens that sessions of `agent` begin with and the last one went on with.

        As far as they are on the disk under this `cache_salt`; [] where nothing is.
        """

    def use_adapters(self, wanted: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Have these LoRA adapters loaded, and no others; `info.lora` from now on.

        A file that has changed is read again. Returns when the last request with one that goes has
        ended, and its memory is given back. Raises InvalidRequestError, ModelLoadError; nothing has
        changed then.
        """

    def metrics(self) -> EngineMetrics: ...

    def close(self) -> None:
        """Cancel everything and free the model. Idempotent."""


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that is several replicas of one model."""

    def replicas(self) -> ReplicasInfo:
        """Describe the running replicas, and why there are so many."""
