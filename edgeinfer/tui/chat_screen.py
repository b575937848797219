"""The chat screen: passes keys and messages to the objects that handle them."""

from __future__ import annotations

import contextlib
import time
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static, TextArea

from edgeinfer.chat import context
from edgeinfer.chat.attachments import missing_note
from edgeinfer.chat.commander import other_model_text
from edgeinfer.chat.commands import complete, is_command
from edgeinfer.chat.history.store import purge_deleted
from edgeinfer.chat.speculative_prefill import SpeculativePrefill
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.errors import ContextLengthError, EdgeInferError, ModelNotPulledError, StoreError
from edgeinfer.tui.actions import AppFrontEnd, TurnActions
from edgeinfer.tui.answering import Answering
from edgeinfer.tui.bindings import bindings
from edgeinfer.tui.composer import AttachmentList, Completions, Composer, Queue
from edgeinfer.tui.transcript import Transcript
from edgeinfer.tui.view import ChatView, Loader, Streaming

#: Choices if the context is full and there are older turns: command, label, explanation.
_FULL_CONTEXT_CHOICES = (
    ("drop", "Leave the oldest turns out", "they stay in the conversation, but are no longer sent"),
    ("summarise", "Summarise the oldest turns", "a short summary is sent in their place"),
)


class ChatScreen(Screen[None]):
    BINDINGS: ClassVar[list[Binding]] = [*bindings("chat"), *bindings("turn")]  # type: ignore[assignment]

    class Left(Message):
        """Posted when the user wants to leave the chat."""

    def __init__(self, setup: ChatSetup) -> None:
        super().__init__()
        self.setup = setup
        self.session = setup.session()
        self.loader = Loader(setup.engines(), self.post_message)
        self._interrupted = 0.0

    def compose(self) -> ComposeResult:
        self.view = ChatView(self.setup, self.session, self.loader)
        self.transcript = self.view.transcript
        self.composer = self.view.composer
        self.status = self.view.status
        self.completions = Completions(id="completions")
        attached = Static("", id="attachments", markup=False)
        queued = Static("", id="queued", markup=False)
        self.queue = Queue(queued, self.composer)
        self.attachments = AttachmentList(self.session, attached, self.setup.attachments)
        self.answering = Answering(self.view)
        self.speculative_prefill = SpeculativePrefill(self.session)
        self.front = AppFrontEnd(
            self.app, self.setup, self.view, self.answering, self.attachments, self._leave_app
        )
        self.turns = TurnActions(self.view, self.front)
        yield self.view.header
        yield self.transcript
        yield queued
        yield self.completions
        yield attached
        yield self.composer
        yield self.status

    def on_mount(self) -> None:
        self.composer.focus()
        self.view.show_welcome()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        try:
            self._open()
        except StoreError as error:
            self.view.show_error(error)
        self.attachments.show()
        self.loader.start(self.view.model)
        self.view.refresh_status()
        self.set_interval(0.25, self._tick)
        self.set_interval(0.1, self.answering.show_other_changes)
        self.set_timer(2.0, self._clean_up)
        if self.setup.with_tools:
            self.run_command("/tools on")

    def _open(self) -> None:
        setup = self.setup
        note = self.session.open_last(setup.typed_model) if setup.continue_last else ""
        self.composer.set_past(self.session.store.past_questions())
        if self.session.path:
            self.view.show_session()
        for text in filter(None, (note, self.session.unstored)):
            self.front.show_text(text)
        self.front.show_draft(self.composer.text)

    def _clean_up(self) -> None:
        with contextlib.suppress(StoreError):
            self.session.store.clean_up()
        self.run_worker(lambda: purge_deleted(self.setup.open_store), thread=True, group="purge")

    def _tick(self) -> None:
        cached_tokens = self.view.cached_tokens
        self.view.cached_tokens = self.speculative_prefill.cached_tokens
        is_new = cached_tokens != self.view.cached_tokens
        if self.streaming is not None or self.loader.progress or is_new:
            self.view.refresh_status()
        self._save_draft()
        looked_at = (self.composer.text, self.attachments.current, self.composer.editing)
        if self.setup.config.read_ahead and self.speculative_prefill.check_input(*looked_at):
            self.speculative_prefill.start()

    def _save_draft(self) -> None:
        typed = self.composer.text if self.composer.editing is None else self.composer.draft
        draft = "" if is_command(typed.strip()) else typed
        if self.session.conversation.id and draft != self.session.conversation.draft:
            with contextlib.suppress(StoreError):
                if self.session.owns_draft():
                    self.session.set(draft=draft)

    @property
    def streaming(self) -> Streaming | None:
        return self.view.streaming

    @on(Loader.Ended)
    def _load_ended(self, message: Loader.Ended) -> None:
        if not self.loader.finish(message):
            return
        if isinstance(message.outcome, EdgeInferError):
            self._not_loaded(message.model, message.outcome)
            return
        self.session.use_engine(message.outcome, message.model)
        if self.session.conversation.model != message.model:
            self.session.set(model=message.model)
        self.attachments.show()
        for warning in message.outcome.info.warnings:
            self.notify(warning, severity="warning", timeout=10)
        self.view.refresh_status()
        self.answering.answer_waiting()

    def _not_loaded(self, model: str, error: EdgeInferError) -> None:
        self.session.use_engine(*self.loader.loaded)
        self.view.refresh_status()
        if self.session.engine is not None and self.front.followed == model:
            self.front.show_text(other_model_text(error, self.session.model))
            self.answering.answer_waiting()
            return
        if isinstance(error, ModelNotPulledError):  # the question waits until a model is picked
            self.front.pick_model(model, first=True)
            return
        waiting, self.answering.unanswered = self.answering.unanswered, 0
        head = self.session.head
        self.view.show_error(error, head.content if head is not None and head.id == waiting else "")

    @on(Composer.Sent)
    def _send_typed(self, message: Composer.Sent) -> None:
        self.completions.offer([])
        self.answering.show_other_changes()
        line = message.text.strip()
        if not is_command(line) and self.answering.take_decision(line):
            self.composer.clear()
        elif is_command(line):
            self.composer.remember(line)
            self.composer.clear()
            self._save_draft()  # at once, because the command may open another conversation
            self.run_command(line)
        elif self.session.busy and message.editing is None:
            self.composer.clear()
            self.queue.add(message.text)
        else:
            self.composer.clear()
            if message.editing is not None:
                self.composer.fill(self.composer.draft)
            self.composer.editing = None
            self._send_or_put_back(message.text, message.editing)

    def _send_or_put_back(self, text: str, editing: int | None) -> None:
        if not self.send(text, editing):
            self.composer.editing = editing or self.composer.editing
            self.composer.fill(text, "" if editing else self.composer.text)

    @on(Answering.Ended)
    def _send_queued(self, message: Answering.Ended) -> None:
        """Send the next queued message; after a failure or a switch, put all into the input field."""
        turn = message.turn
        is_here = turn.conversation_id == self.session.conversation.id
        if not is_here or turn.status == "failed" or turn.context_full:
            self.queue.take_back_all()
        elif not self.session.busy and (text := self.queue.next()):
            self._send_or_put_back(text, None)

    @on(Composer.TakenBack)
    def _take_back(self) -> None:
        self.queue.take_back()

    @on(Composer.Removed)
    def _remove_attachment(self) -> None:
        self.attachments.remove_last()

    @on(Composer.Pasted)
    def _attach_paste(self, message: Composer.Pasted) -> None:
        """Attach a long pasted text. If the text does not fit into the context, ask what to do."""
        pasted = self.attachments.paste(message.text)
        engine = self.session.engine
        if engine is None or pasted.tokens <= engine.info.n_ctx - context.ANSWER_TOKENS:
            return
        text = f"The text has {pasted.tokens:,} tokens, the context {engine.info.n_ctx:,}."
        choices = [
            ("beginning", "Attach its beginning", "as much as fits into the context with an answer"),
            *self._larger_context(pasted.tokens),
            ("leave", "Leave it out", "Backspace in the empty composer removes what is attached, too"),
        ]
        self._choose_way("A long text was pasted", text, choices)

    def run_command(self, line: str) -> None:
        """Run a `/` command line; show the error if the command fails."""
        try:
            self.front.commander.run(line)
        except ContextLengthError as error:
            self.offer_context_choices(error)
        except EdgeInferError as error:
            self.view.show_error(error)
        self.view.refresh_status()

    def send(self, text: str, editing: int | None) -> bool:
        """Store, show and answer a question; if storing fails, show the error and return False."""
        try:
            attached = self.attachments.collect(text)
            if editing is None:
                self.session.ask(text, attached)
            else:
                self.session.edit(editing, text, attached)
        except EdgeInferError as error:
            self.view.show_error(error)
            return False
        self.speculative_prefill.stop()
        self.composer.remember(text)
        self.attachments.clear()
        self.view.show_session()
        self.answering.answer_question()
        if note := missing_note(text):
            self.notify(note, severity="warning")
        return True

    @on(Answering.ContextFull)
    def _offer_context_choices(self, message: Answering.ContextFull) -> None:
        self.offer_context_choices(message.error)

    def offer_context_choices(self, error: EdgeInferError) -> None:
        """Say that the context is full, and let the user choose what to do."""
        questions = [turn for turn in self.session.path if turn.role == "user"]
        choices = [*_FULL_CONTEXT_CHOICES] if len(questions) > 1 else []
        if self.session.engine is not None:
            n_tokens = context.prompt_tokens(self.session, self.session.engine, self.session.path)
            choices += self._larger_context(n_tokens)
        choices.append(("edit", "Edit the question", "it comes back into the composer"))
        self._choose_way("The context is full", error.message, choices)

    def _larger_context(self, n_tokens: int) -> list[tuple[str, str, str]]:
        engine = self.session.engine
        n_ctx = context.larger_context(engine, n_tokens) if engine is not None else 0
        meaning = "the model is loaded again and needs more memory"
        return [(f"ctx {n_ctx}", f"Load with a context of {n_ctx:,}", meaning)] if n_ctx else []

    def _choose_way(self, title: str, text: str, choices: list[tuple[str, str, str]]) -> None:
        from edgeinfer.tui.screens.dialogs import ChoiceScreen

        self.app.push_screen(ChoiceScreen(title, text, choices), self._apply_choice)

    def _apply_choice(self, choice: str | None) -> None:
        engine = self.session.engine
        if choice == "leave":
            self.attachments.remove_last()
        elif choice == "beginning" and engine is not None:
            text = self.attachments.unnamed[-1].text
            self.attachments.remove_last()
            self.attachments.paste(context.fitting_start(engine, text))
        elif choice:
            head = self.session.head
            waits = choice.startswith("ctx") and head is not None and head.failed_without_text
            self.answering.unanswered = head.id if waits and head is not None else 0
            self.run_command(f"/{choice}")

    @on(TextArea.Changed, "#composer")
    def _complete_typed(self) -> None:
        before = self.composer.before_cursor
        completions = [] if self.composer.is_recalled else complete(before, self.front.names())
        self.completions.offer(completions)
        self.composer.completing = bool(completions)
        choice = self.completions.choice
        self.composer.can_take = (
            choice is not None and not choice.whole and before[-choice.length :] != choice.text.rstrip()
        )
        self.attachments.read_mentioned(self.composer.text)

    @on(Composer.Choosing)
    def _choose(self, message: Composer.Choosing) -> None:
        if message.step:
            self.completions.step(message.step)
            self.composer.can_take = True
            return
        choice = self.completions.choice
        if choice is not None:
            row, column = self.composer.cursor_location
            self.composer.replace(choice.text, (row, column - choice.length), (row, column))

    @on(Completions.OptionSelected)
    def _clicked_completion(self) -> None:
        self._choose(Composer.Choosing(0))
        self.composer.focus()

    def on_key(self, event: events.Key) -> None:
        """Insert typed characters into the input field if the transcript has the focus."""
        reading = self.focused is self.transcript and self.transcript.selection is None
        if reading and event.is_printable and event.character:
            event.stop()
            self.composer.focus()
            self.composer.insert(event.character)

    def action_slash(self, line: str) -> None:
        self.run_command(f"/{line}")

    def action_stop(self) -> None:
        if self.completions.offered:
            self.completions.offer([])
            self.composer.completing = False
        elif self.transcript.selection is not None:
            self.turns.leave()
        elif self.composer.editing is not None:
            self.composer.fill(self.composer.draft)
            self.composer.editing = None
        elif not self.queue.take_back():
            self.answering.stop()

    def action_interrupt(self) -> None:
        selected = self.get_selected_text() or self.composer.selected_text
        if selected:
            self.front.copy(selected, "the selection")
            self.clear_selection()
        elif self.streaming is not None:
            self.answering.stop()
        elif time.monotonic() - self._interrupted < 2:
            self._leave_app()
        else:
            self._interrupted = time.monotonic()
            self.notify("Press Ctrl+C again to leave. Everything is stored.", timeout=2)

    def action_suspend(self) -> None:
        self._save_draft()
        self.app.action_suspend_process()

    def action_scroll(self, pages: int) -> None:
        transcript = self.transcript
        if abs(pages) > 1:
            y = float(transcript.max_scroll_y if pages > 0 else 0)
        else:
            y = transcript.scroll_y + pages * max(1, transcript.size.height - 2)
        transcript.scroll_to(y=y, animate=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "turn":
            return self.focused is self.transcript and self.transcript.selection is not None
        return True

    def action_walk(self, step: int) -> None:
        self.turns.walk(step)

    def action_turn(self, action: str) -> None:
        self.turns.act(action)

    @on(Transcript.Clicked)
    def _mark_clicked(self, message: Transcript.Clicked) -> None:
        self.turns.click(message)

    @on(Composer.Left)
    def _leave_app(self) -> None:
        self.post_message(self.Left())

    def leave(self) -> None:
        """Store the draft and the partial answer. The app calls this before it ends."""
        self.speculative_prefill.stop()
        if self.session.answer is not None and self.session.is_answering:
            self.session.answer.flush()
            self.session.answer.abandon()
        if self.session.tools is not None:
            self.session.tools.close()
        self.queue.take_back_all()
        self._save_draft()
        self.session.release_draft()
