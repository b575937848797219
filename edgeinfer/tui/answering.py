"""Answers questions on the screen: every generation of the chat begins and ends here."""

from __future__ import annotations

from collections.abc import Callable

from textual.message import Message

from edgeinfer.chat import context
from edgeinfer.chat.history.values import Turn
from edgeinfer.chat.session import Answer
from edgeinfer.errors import ContextLengthError, EdgeInferError, StoreError
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.interface import Generation
from edgeinfer.tui.drawing.entry import AnswerEntry
from edgeinfer.tui.view import Streaming, View


class Answering:
    """Streams answers to questions. `unanswered`: the last question waits for its model."""

    class RoomWanted(Message):
        """The context is full: the user must choose what to leave out."""

        def __init__(self, error: EdgeInferError) -> None:
            super().__init__()
            self.error = error

    class Ended(Message):
        def __init__(self, turn: Turn) -> None:
            super().__init__()
            self.turn = turn

    def __init__(self, view: View) -> None:
        self._view = view
        self._session = view.session
        self.unanswered = False

    def answer_question(self) -> None:
        """Answer the question at the end of the branch, once the model is loaded."""
        self.unanswered = self._session.engine is None
        if self.unanswered:
            self._view.loader.start(self._view.model)
            self._view.refresh_status()
        else:
            self._begin(self._session.begin_answer)

    def answer_after_cut(self) -> None:
        """Answer the question that did not fit before the oldest turns were left out."""
        self._view.show_session()
        head = self._session.head
        if head is not None and head.failed_empty:
            self._begin(self._session.regenerate)
        elif head is not None and head.role == "user":
            self.answer_question()

    def _begin(self, begin: Callable[[], Answer]) -> None:
        question = self._session.question
        try:
            self.stream(begin())
        except EdgeInferError as error:
            self._view.show_session()
            if isinstance(error, ContextLengthError):
                self.want_room(error)
            else:
                self._view.show_next_step(error, question.content if question else "")

    def stream(self, answer: Answer) -> None:
        entry = AnswerEntry(answer.turn, streaming=True)
        streaming = Streaming(answer, entry, self._view.transcript)
        self._view.streaming = streaming
        self._view.show_session()
        self._view.transcript.run_worker(self._stream(streaming), group="answer")

    async def _stream(self, streaming: Streaming) -> None:
        turn, error = await streaming.run()
        self._view.note_prompt(streaming.answer)
        if self._view.streaming is streaming:
            self._view.streaming = None
        if turn.conversation_id == self._session.conversation.id:
            streaming.entry.finish(turn, self._session.alternatives(turn.id))
            self._view.transcript.redrawn(streaming.entry)
            self._after(turn, error, streaming.answer.store_error)
        self._view.refresh_status()
        self._view.transcript.post_message(self.Ended(turn))

    def _after(self, turn: Turn, error: EdgeInferError | None, store_error: StoreError | None) -> None:
        if store_error is not None:
            self._view.show_error(store_error)
        if error is not None:
            question = self._session.turn(turn.parent_id) if turn.parent_id else None
            self._view.show_next_step(error, question.content if question and not turn.content else "")
        elif turn.context_full:
            message = f"the context of {turn.stats.n_ctx:,} tokens is full"
            self.want_room(ContextLengthError(message, param="messages"))

    def want_room(self, error: EdgeInferError) -> None:
        self._view.transcript.post_message(self.RoomWanted(error))

    def summarise(self, kept: Turn) -> None:
        """Summarise the turns before `kept`, cut there, and answer the question that did not fit."""
        if self._view.summarising is not None:
            return
        engine = self._session.idle_engine()
        generation = engine.submit(context.summary_request(self._session, engine, kept))
        self._view.summarising = generation
        self._view.transcript.run_worker(self._summarise(generation, kept), group="answer")

    async def _summarise(self, generation: Generation, kept: Turn) -> None:
        conversation = self._session.conversation.id
        try:
            pieces = [event.text async for event in generation if isinstance(event, TextDelta)]
            text = "".join(pieces).strip()
            if text and self._session.conversation.id == conversation:
                self._session.cut(kept.id, text)
                self.answer_after_cut()
        except EdgeInferError as error:
            self._view.show_error(error)
        finally:
            self._view.summarising = None
            self._view.refresh_status()

    def stop(self) -> bool:
        """Stop the answer or summary being generated; return False if there is none."""
        if self._view.streaming is not None:
            self._view.streaming.answer.stop()
            return True
        if self._view.summarising is not None:
            self._view.summarising.cancel()
            return True
        return False
