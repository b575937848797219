"""An answer while it is being written: stored before anything is shown, and ended once.

The front drives it: `for event in answer.generation: answer.add(event)`, and shows what `flush()`
returns, as often as it likes. Nothing leaves `flush` that is not in the store.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from edgeinfer.cache_report import CacheReport
from edgeinfer.chat.history.store import Store
from edgeinfer.chat.history.values import Stats, Status, Turn
from edgeinfer.errors import EdgeInferError, StoreError
from edgeinfer.runtime.events import Event, Finished, Progress
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.interface import Generation
from edgeinfer.runtime.repetition import RepetitionWatch


class Answer:
    """One generation into one turn.

    `turn` is the stored turn as it stood when this began; `done` is it, ended, and `cache_report` what
    was remembered then.
    """

    def __init__(
        self,
        store: Store,
        turn: Turn,
        generation: Generation,
        n_ctx: int,
        ended: Callable[[Turn], None],
    ) -> None:
        self.turn = turn
        self.generation = generation
        self.done: Turn | None = None
        self.cache_report: CacheReport | None = None
        self.store_error: StoreError | None = None
        self._store = store
        self._n_ctx = n_ctx
        self._ended = ended
        self._all = Collected(turn.content, turn.reasoning)
        self._new = Collected()
        self._watch = RepetitionWatch()
        self._repeats = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._all.text

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._all.reasoning

    @property
    def progress(self) -> Progress | None:
        """How far the prompt is, once the engine has said so."""
        return self._all.progress

    def add(self, event: Event) -> None:
        """Add one event of the generation; `Finished` ends the answer."""
        self._all.add(event)
        self._new.add(event)
        if isinstance(event, Finished):
            self._finish(event)

    def flush(self) -> Collected:
        """Store what came since the last flush and return it.

        A store that fails does not stop the answer: `store_error`. An answer that repeats itself is
        stopped.
        """
        new, self._new = self._new, Collected()
        if (new.text or new.reasoning) and self.done is None:
            try:
                self._store.append(self.turn.id, new.text, new.reasoning)
            except StoreError as error:
                self.store_error = error
            if self._watch.add(new.reasoning + new.text):
                self._repeats = True
                self.stop()
        return new

    def stop(self) -> None:
        """Ask the engine to stop; the partial answer is kept."""
        self.generation.cancel()

    def fail(self, error: EdgeInferError) -> Turn:
        """End it with an error, keeping what was said."""
        return self._end("failed", error.message, self.turn.stats)

    def abandon(self) -> Turn:
        """End it because the front ends: kept as stopped."""
        self.generation.cancel()
        return self._end("stopped", "", self.turn.stats)

    def _finish(self, end: Finished) -> None:
        statuses: dict[str, Status] = {
            "length": "length",
            "cancelled": "stopped",
            "deadline": "stopped",
        }
        stats = Stats(
            prompt_tokens=end.usage.prompt_tokens,
            cached_tokens=end.usage.cached_tokens,
            completion_tokens=end.usage.completion_tokens,
            reasoning_tokens=end.usage.reasoning_tokens,
            ttft_ms=end.timings.ttft_ms,
            tokens_per_s=end.timings.decode_tokens_per_s(end.usage.completion_tokens),
            n_ctx=self._n_ctx,
        )
        self.cache_report = CacheReport.of(self.turn.model, end)
        repeated = "the answer repeated itself" if self._repeats and end.reason == "cancelled" else ""
        self._end(statuses.get(end.reason, "complete"), repeated, stats)

    def _end(self, status: Status, error: str, stats: Stats) -> Turn:
        if self.done is None:
            self.done = msgspec.structs.replace(
                self.turn,
                content=self.text,
                reasoning=self.reasoning,
                status=status,
                error=error,
                stats=stats,
            )
            try:
                self._store.finish(self.done)
            except StoreError as failure:
                self.store_error = failure
            self._ended(self.done)
        return self.done
