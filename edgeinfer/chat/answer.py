"""Store the events of a generation as one turn of a conversation."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Stats, Status, Turn
from edgeinfer.errors import EdgeInferError, StoreError
from edgeinfer.platform.ed25519 import SigningKey
from edgeinfer.receipts.receipt import Receipt, Refusal, make_receipt
from edgeinfer.runtime.event_stream import CollectedAnswer, RepetitionWatch
from edgeinfer.runtime.events import CacheReport, Event, Finished
from edgeinfer.runtime.interface import Generation
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.tools.tool_use import ToolUse, uses_of


class AnswerWriter(CollectedAnswer):
    """Stores an answer, i.e. one turn of a conversation, while the engine generates it.

    `done` is the stored turn after the end of the answer, None before.
    """

    def __init__(
        self,
        store: ConversationStore,
        turn: Turn,
        request: GenerateRequest,
        generation: Generation,
        info: EngineInfo,
        on_end: Callable[[Turn], None],
    ) -> None:
        super().__init__(turn.content, turn.reasoning)
        self.turn = turn
        self.request = request
        self.generation = generation
        self.done: Turn | None = None
        self.cache_report: CacheReport | None = None
        self.store_error: StoreError | None = None
        self._store = store
        self._info = info
        self._on_end = on_end
        self._uses: tuple[ToolUse, ...] = ()
        self._new = CollectedAnswer()
        self._watch = RepetitionWatch()
        self._repeats = False

    def receipt(self, key: SigningKey | None) -> Receipt | Refusal:
        """Return a receipt, with which `edgeinfer verify` checks the answer; signed if `key` is set.

        Returns a Refusal with the reason if no receipt can be made, e.g. of an unfinished answer.
        """
        if self.last_event is None:
            return Refusal(refused="the answer has failed, or has not ended yet")
        return make_receipt(self.request, self.last_event, self._info, key=key)

    def add(self, event: Event) -> None:
        """Add an event of the generation; the event `Finished` ends the answer and stores its turn."""
        super().add(event)
        self._new.add(event)
        if isinstance(event, Finished):
            self._finish(event)

    def flush(self) -> CollectedAnswer:
        """Store the text that was added since the last call, and return that text.

        Stops the generation if the answer repeats itself. A StoreError is not raised: the attribute
        `store_error` is set to it.
        """
        new, self._new = self._new, CollectedAnswer()
        if (new.text or new.reasoning) and self.done is None:
            try:
                self._store.append(self.turn.id, new.text, new.reasoning)
            except StoreError as error:
                self.store_error = error
            if self._watch.add(new.reasoning + new.text) is not None:
                self._repeats = True
                self.stop()
        return new

    def stop(self) -> None:
        """Ask the engine to stop generating; the answer keeps its text so far."""
        self.generation.cancel()

    def fail(self, error: EdgeInferError) -> Turn:
        """End the answer as failed with `error`, keep the text so far, and return the ended turn."""
        return self._end("failed", error.message, self.turn.stats)

    def abandon(self) -> Turn:
        """Cancel the generation, store the answer as stopped, and return the ended turn."""
        self.generation.cancel()
        return self._end("stopped", "", self.turn.stats)

    def _finish(self, finished: Finished) -> None:
        statuses: dict[str, Status]
        statuses = {"length": "length", "cancelled": "stopped", "deadline": "stopped"}
        stats = Stats(
            prompt_tokens=finished.usage.prompt_tokens,
            cached_tokens=finished.usage.cached_tokens,
            completion_tokens=finished.usage.completion_tokens,
            reasoning_tokens=finished.usage.reasoning_tokens,
            ttft_ms=finished.timings.ttft_ms,
            tokens_per_s=finished.timings.decode_tokens_per_s(finished.usage.completion_tokens),
            n_ctx=self._info.n_ctx,
            seconds=finished.timings.total_ms / 1000,
            saved_s=finished.timings.saved_ms / 1000,
        )
        if finished.reason == "tool_calls":
            self._uses = uses_of(self)
        self.cache_report = CacheReport.of(self.turn.model, finished)
        is_repeated = self._repeats and finished.reason == "cancelled"
        error = "the answer repeated itself" if is_repeated else ""
        self._end(statuses.get(finished.reason, "complete"), error, stats)

    def _end(self, status: Status, error: str, stats: Stats) -> Turn:
        if self.done is None:
            self.done = msgspec.structs.replace(
                self.turn,
                content=self.text,
                reasoning=self.reasoning,
                calls=self._uses,
                status=status,
                error=error,
                stats=stats,
            )
            try:
                self._store.finish(self.done)
            except StoreError as failure:
                self.store_error = failure
            self._on_end(self.done)
        return self.done
