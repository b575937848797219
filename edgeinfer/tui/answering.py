"""Run answers on the chat screen: stream them, run their tool calls, summarise old turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec
from textual.message import Message

from edgeinfer.chat import context
from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.history.store import other_writer_error
from edgeinfer.chat.history.values import Turn
from edgeinfer.errors import ContextLengthError, EdgeInferError, StoreError
from edgeinfer.runtime.interface import Generation
from edgeinfer.tools.approval import Decision
from edgeinfer.tools.tool_use import Stop, ToolUse
from edgeinfer.tui.drawing.entry import AnswerEntry, Remark, call_name
from edgeinfer.tui.view import ChatView, Streaming

if TYPE_CHECKING:
    from edgeinfer.tools.loop import Card

T = TypeVar("T")


class Answering:
    """Starts and stops the answers of the chat screen.

    `unanswered` is the id of the question that waits for a model to be loaded, 0 if there is none.
    """

    @dataclass
    class ContextFull(Message):
        """Posted when the context is full: the user must choose which turns to leave out."""

        error: EdgeInferError

    @dataclass
    class Ended(Message):
        turn: Turn

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._session = view.session
        self._typed: SimpleQueue[str | None] | None = None
        self.unanswered = 0

    def answer_question(self) -> None:
        """Answer the last question of the open branch. If no model is loaded, load it first."""
        if self._session.engine is None:
            self.unanswered = self._session.conversation.head_id or 0
            self._view.loader.start(self._view.model)
            self._view.refresh_status()
        else:
            self._begin(self._session.begin_answer)

    def answer_waiting(self) -> None:
        """Answer the question that waited for the model, unless the user has left its branch."""
        waiting, self.unanswered = self.unanswered, 0
        if waiting and waiting == self._session.conversation.head_id:
            self.answer_after_shortening()

    def answer_after_shortening(self) -> None:
        """Answer the last question again, now that older turns are no longer sent."""
        self._view.show_session()
        head = self._session.head
        if head is not None and head.failed_without_text and self._session.engine is not None:
            self._begin(self._session.regenerate)
        elif head is not None and (head.failed_without_text or head.role == "user"):
            self.answer_question()

    def _begin(self, begin: Callable[[], AnswerWriter]) -> None:
        question = self._session.question
        try:
            self.stream(begin())
        except EdgeInferError as error:
            self._view.show_session()
            if isinstance(error, ContextLengthError):
                self.report_full_context(error)
            else:
                self._view.show_next_step(error, question.content if question else "")

    def stream(self, answer: AnswerWriter) -> None:
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
            self._view.transcript.update_entry(streaming.entry)
            self._report(turn, error, streaming.answer.store_error)
        self._view.refresh_status()
        if self._session.calls is not None and error is None:
            await self._run_calls(self._session.calls)
        else:
            self._view.transcript.post_message(self.Ended(turn))

    def _report(self, turn: Turn, error: EdgeInferError | None, store_error: StoreError | None) -> None:
        if store_error is not None:
            self._view.show_error(store_error)
        if error is not None:
            question = self._session.turn(turn.parent_id) if turn.parent_id else None
            self._view.show_next_step(error, question.content if question and not turn.content else "")
        elif turn.context_full:
            message = f"the context of {turn.stats.n_ctx:,} tokens is full"
            self.report_full_context(ContextLengthError(message, param="messages"))

    def show_other_changes(self) -> None:
        """Show what another process has written to the conversation, also its unfinished answer."""
        before = self._session.answer_elsewhere
        with contextlib.suppress(StoreError):  # the next call, 0.1 s later, may succeed
            if self._session.refresh():
                self._show_changed(before)
            elif (new := self._session.follow()).text or new.reasoning:
                self._view.grow(before, new)

    def _show_changed(self, before: Turn | None) -> None:
        self._view.show_session(stays=True)
        if not self._session.conversation.id:
            self._view.add_remark(Remark("Another window deleted the conversation."))
        if before is not None and self._session.answer_elsewhere is None:
            self._view.transcript.post_message(self.Ended(self._session.head or before))

    def wait_for(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `work`, which asks tool servers, in a thread; then call `then` with the result."""
        self._view.calling = "asking tool servers…"
        self._view.refresh_status()
        self._view.transcript.run_worker(self._wait_for(work, then), group="tools")

    async def _wait_for(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        try:
            result = await asyncio.to_thread(work)
            self._view.calling = ""
            then(result)
        except EdgeInferError as error:
            self._view.show_error(error)
        finally:
            self._view.calling = ""
            self._view.refresh_status()

    async def _run_calls(self, turn: Turn) -> None:
        tools = self._session.tools
        assert tools is not None
        try:
            run = self._session.start_calls(turn, self)
        except EdgeInferError as error:
            self._view.show_error(error)
            self._view.transcript.post_message(self.Ended(turn))
            return
        try:
            calls = await asyncio.to_thread(run)
        finally:
            self._view.calling, self._typed = "", None
            self._view.refresh_status()
        try:
            goes_on = self._session.note_calls(turn, calls)
        except StoreError as failure:
            self._view.show_error(failure)
            goes_on = False
        if notices := tools.notices():
            self._view.transcript.notify("\n".join(notices), severity="warning", timeout=10)
        if goes_on:
            self._begin(self._session.begin_answer)
            return
        if turn.conversation_id == self._session.conversation.id:
            self._view.show_session()
        self._view.transcript.post_message(self.Ended(msgspec.structs.replace(turn, calls=calls)))

    def decide(self, card: Card) -> Decision:
        """Ask the user to allow a tool call, and return the decision. Blocks the thread of the call."""
        return card.ask(self._ask)

    def _ask(self, text: str) -> str | None:
        """Show `text` and return what the user then types; None if the tool calls are stopped."""
        typed: SimpleQueue[str | None] = SimpleQueue()
        tools = self._session.tools
        stop = tools.running if tools is not None else None
        if stop is None:
            return None
        stop.add(lambda: typed.put(None))
        self._view.transcript.call_later(self._show_card, text, typed, stop)
        return typed.get()

    def show_use(self, use: ToolUse, progress: str) -> None:
        """Show `progress` about a running tool call or, if the text is "", the result. Thread-safe."""
        self._view.transcript.call_later(self._show_progress, use, progress)

    def _show_card(self, text: str, typed: SimpleQueue[str | None], running: Stop) -> None:
        """Show a question about a tool call unless the call was stopped; `typed` gets the answer."""
        if running.is_set:
            return
        self._typed = typed
        self._view.calling = "a call waits for your decision"
        self._view.add_remark(Remark(text))
        self._view.refresh_status()

    def _show_progress(self, use: ToolUse, progress: str) -> None:
        tools = self._session.tools
        if tools is not None and tools.running is not None:  # the calls may have ended meanwhile
            self._view.calling = f"{call_name(use)} {progress}" if progress else "calling…"
        if not progress:
            self._view.show_use(use)
        self._view.refresh_status()

    def take_decision(self, text: str) -> bool:
        """Take `text` as the user's decision on a waiting tool call; return False if none waits."""
        typed, self._typed = self._typed, None
        if typed is not None:
            self._view.calling = "calling…"
            typed.put(text)
        return typed is not None

    def report_full_context(self, error: EdgeInferError) -> None:
        self._view.transcript.post_message(self.ContextFull(error))

    def summarise(self, first_sent: Turn) -> None:
        """Let the model summarise the turns before `first_sent`, then answer the last question."""
        if self._view.summarising is not None:
            return
        engine = self._session.idle_engine()
        generation = engine.submit(context.summary_request(self._session, engine, first_sent))
        self._view.summarising = generation
        self._view.transcript.run_worker(self._summarise(generation, first_sent), group="answer")

    async def _summarise(self, generation: Generation, first_sent: Turn) -> None:
        conversation = self._session.conversation.id
        try:
            text = context.summary_text([event async for event in generation])
            if text and self._session.conversation.id == conversation:
                self._session.drop_turns_before(first_sent.id, text)
                self.answer_after_shortening()
        except EdgeInferError as error:
            self._view.show_error(error)
        finally:
            self._view.summarising = None
            self._view.refresh_status()

    def stop(self) -> bool:
        """Stop the running answer, summary or tool calls; return False if nothing is running."""
        if self._view.streaming is not None:
            self._view.streaming.answer.stop()
            return True
        if self._view.summarising is not None:
            self._view.summarising.cancel()
            return True
        if self._session.answer_elsewhere is not None:
            self._view.show_error(other_writer_error())
            return True
        return self._session.tools is not None and self._session.tools.stop()
