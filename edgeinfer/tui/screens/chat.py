"""The chat itself: header, conversation, completions, composer, status. Keys and messages arrive here
and go to their rooms.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Static, TextArea

from edgeinfer.chat import library
from edgeinfer.chat.answer import Answer
from edgeinfer.chat.code import code_blocks
from edgeinfer.chat.commander import Commander
from edgeinfer.chat.complete import complete
from edgeinfer.chat.opening import Launch
from edgeinfer.chat.slash import is_command
from edgeinfer.chat.values import Turn
from edgeinfer.error_text import hint
from edgeinfer.errors import ContextLengthError, EdgeInferError, StoreError, UsageError
from edgeinfer.tui.answering import Streaming
from edgeinfer.tui.attaching import Attaching
from edgeinfer.tui.bindings import bindings
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.front import AppFront
from edgeinfer.tui.loading import Loading
from edgeinfer.tui.statusline import status_parts
from edgeinfer.tui.widgets.completions import Completions
from edgeinfer.tui.widgets.composer import Composer
from edgeinfer.tui.widgets.status import Status
from edgeinfer.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from edgeinfer.tui.app import ChatApp

_PLACEHOLDER = "Ask something"


class ChatScreen(Screen[None]):
    """One conversation on show. What it says and stores is the session's; what it loads, the
    loader's.
    """

    BINDINGS: ClassVar[list[Binding]] = [*bindings("chat"), *bindings("turn")]  # type: ignore[assignment]
    app: ChatApp

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch
        self.session = launch.session()
        self.front = AppFront(self)
        self.commander = Commander(self.session, self.front, launch.config)
        self.loader = Loading(self, launch)
        self.attaching = Attaching(self, launch.attachments)
        self.streaming: Streaming | None = None
        self.unanswered = False
        self._code_at = 0
        self._interrupted = 0.0

    def compose(self) -> ComposeResult:
        yield Static("", id="header", markup=False)
        yield Transcript(id="transcript")
        yield Completions(id="completions")
        yield Static("", id="attachments", markup=False)
        yield Composer(_PLACEHOLDER, id="composer")
        yield Status(id="status")

    def on_mount(self) -> None:
        self.transcript = self.query_one(Transcript)
        self.composer = self.query_one(Composer)
        self.completions = self.query_one(Completions)
        self.status = self.query_one(Status)
        self.composer.focus()
        self.transcript.show([self._welcome()])
        self.refresh_status()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """After the first paint: what was said before, and the model."""
        try:
            if self.launch.continue_last and not self.session.open_last():
                self.front.say("There is no conversation yet to continue.")
            self.composer.set_past(library.typed(self.session.store))
            if self.session.path:
                self.show_session()
            self.composer.fill(self.session.conversation.draft or self.composer.text)
        except StoreError as error:
            self.trouble(error)
        self.attaching.show()
        self.loader.start(self.session.conversation.model or self.launch.model)
        self.set_interval(0.25, self._tick)
        self.set_timer(2.0, self._settle)

    def _settle(self) -> None:
        with contextlib.suppress(StoreError):
            self.session.store.settle()

    def _tick(self) -> None:
        if self.streaming is not None or self.loader.words:
            self.refresh_status()
        self._save_draft()

    def _save_draft(self) -> None:
        draft = "" if self.composer.editing else self.composer.text
        if self.session.conversation.id and draft != self.session.conversation.draft:
            with contextlib.suppress(StoreError):
                self.session.set(draft=draft)

    # showing

    def _welcome(self) -> Welcome:
        return Welcome(self.session.conversation.model or self.launch.model, self.app.started)

    def show_session(self) -> None:
        """Show the branch the session is on."""
        entries: list[Entry] = [self.entry(turn) for turn in self.session.path]
        self.transcript.show(entries or [self._welcome()])
        self.refresh_status()

    def entry(self, turn: Turn) -> Entry:
        """A turn as the transcript shows it."""
        page = self.session.alternatives(turn.id)
        if turn.role == "user":
            return Question(turn, page)
        running = self.streaming is not None and self.streaming.answer.turn.id == turn.id
        return self.streaming.entry if running and self.streaming else AnswerEntry(turn, page)

    def remark(self, entry: Entry) -> None:
        """Show words of ours, at the tail."""
        if any(isinstance(e, Welcome) for e in self.transcript.entries):
            self.transcript.show([])
        self.transcript.following = True
        self.transcript.add(entry)

    def trouble(self, error: EdgeInferError, put_back: str = "") -> None:
        """Show an error with the next thing to do, and put the input back."""
        self.remark(Remark(error.message, "error", hint(error)))
        if put_back and not self.composer.text:
            self.composer.fill(put_back)

    def next_step(self, error: EdgeInferError, put_back: str) -> None:
        """A failed turn says what went wrong; say what to do next, and put the input back."""
        if hint(error):
            self.remark(Remark("", hint=hint(error)))
        if put_back and not self.composer.text:
            self.composer.fill(put_back)

    def refresh_status(self) -> None:
        """Header and status line from what is now."""
        parts, at_right = status_parts(self)
        self.status.show(parts, at_right)
        title = self.session.conversation.title
        self.query_one("#header", Static).update(title)

    # sending

    @on(Composer.Sent)
    def _sent(self, message: Composer.Sent) -> None:
        self.completions.offer([])
        if is_command(message.text.strip()):
            self.composer.remember(message.text.strip())
            self.composer.clear()
            self.run_command(message.text.strip())
            return
        self.send(message.text, message.editing)

    def run_command(self, line: str) -> None:
        """Run one `/` command; what goes wrong is said."""
        try:
            self.commander.run(line)
        except ContextLengthError as error:
            self.offer_room(error)
        except EdgeInferError as error:
            self.trouble(error)
        self.refresh_status()

    def send(self, text: str, editing: int | None) -> None:
        """Store the question, show it, have it answered."""
        try:
            attachments = self.attaching.collect(text)
            if editing is None:
                self.session.ask(text, attachments)
            else:
                self.session.edit(editing, text)
        except EdgeInferError as error:
            self.trouble(error)
            return
        self.composer.remember(text)
        self.composer.clear()
        self.set_editing(None)
        self.attaching.clear()
        self.show_session()
        self.answer_question()

    def answer_question(self) -> None:
        """Answer the question at the end of the branch, once the model is there."""
        if self.session.engine is None:
            self.unanswered = True
            self.loader.start(self.session.conversation.model or self.launch.model)
            self.refresh_status()
            return
        self.unanswered = False
        question = self.session.head
        try:
            self.stream(self.session.begin_answer())
        except ContextLengthError as error:
            self.show_session()
            self.offer_room(error)
        except EdgeInferError as error:
            self.show_session()
            self.next_step(error, question.content if question else "")

    def stream(self, answer: Answer) -> None:
        """Show this answer as it comes."""
        entry = AnswerEntry(answer.turn, streaming=True)
        self.streaming = Streaming(answer, entry, self.transcript)
        self.show_session()
        self._stream(self.streaming)

    @work(group="answer")
    async def _stream(self, streaming: Streaming) -> None:
        turn, error = await streaming.run()
        if self.streaming is streaming:
            self.streaming = None
        if turn.conversation_id == self.session.conversation.id:
            streaming.entry.settle(turn, self.session.alternatives(turn.id))
            self.transcript.redrawn(streaming.entry)
            self._after(turn, error, streaming.answer.store_error)
        self.refresh_status()

    def _after(self, turn: Turn, error: EdgeInferError | None, store_error: StoreError | None) -> None:
        if store_error is not None:
            self.trouble(store_error)
        if error is not None:
            question = self.session.turn(turn.parent_id) if turn.parent_id else None
            self.next_step(error, question.content if question and not turn.content else "")
        elif (
            turn.status == "length"
            and turn.stats.n_ctx
            and turn.stats.context_tokens >= turn.stats.n_ctx - 1
        ):
            full = ContextLengthError(
                f"the context of {turn.stats.n_ctx:,} tokens is full", param="messages"
            )
            self.offer_room(full)

    def offer_room(self, error: EdgeInferError) -> None:
        """The context is full: say so, and offer the ways out."""
        from edgeinfer.tui.screens.choice import ChoiceScreen

        choices = (
            (
                "drop",
                "Leave the oldest turns out",
                "they stay in the conversation, but are no longer sent",
            ),
            ("summarise", "Summarise the oldest turns", "a short summary is sent in their place"),
            ("cancel", "Leave it", "shorten the question, or load with /ctx"),
        )
        self.app.push_screen(
            ChoiceScreen("The context is full", error.message, choices), self._make_room
        )

    def _make_room(self, choice: str | None) -> None:
        if choice in ("drop", "summarise"):
            self.run_command(f"/{choice}")

    def room_made(self) -> None:
        """After a cut: answer the question that did not fit, go on with the answer that was cut."""
        self.show_session()
        head = self.session.head
        if (
            head is not None
            and head.role == "assistant"
            and head.status == "failed"
            and not head.content
        ):
            self.run_command("/regen")
        elif head is not None and head.role == "user":
            self.answer_question()

    def set_editing(self, turn_id: int | None) -> None:
        """Whether what is typed will replace an earlier question."""
        self.composer.editing = turn_id
        self.composer.set_class(turn_id is not None, "-editing")
        self.composer.border_title = (
            "editing an earlier question · Esc leaves it" if turn_id is not None else ""
        )

    # completion

    @on(TextArea.Changed, "#composer")
    def _typed(self) -> None:
        row, column = self.composer.cursor_location
        lines = self.composer.text.split("\n")
        before = (
            "\n".join([*lines[:row], lines[row][:column]]) if row < len(lines) else self.composer.text
        )
        found = complete(before, self.front.names())
        self.completions.offer(found)
        self.composer.completing = bool(found)
        choice = self.completions.choice
        self.composer.can_take = (
            choice is not None and not choice.whole and before[-choice.length :] != choice.text.rstrip()
        )
        self.attaching.typed(self.composer.text)

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

    # keys

    def on_key(self, event: events.Key) -> None:
        """Typing goes to the composer, wherever the focus went."""
        if (
            event.is_printable
            and event.character
            and self.focused is self.transcript
            and self.transcript.chosen is None
        ):
            event.stop()
            self.composer.focus()
            self.composer.insert(event.character)

    def action_slash(self, line: str) -> None:
        self.run_command(f"/{line}")

    def action_editor(self) -> None:
        self.front.edit_outside()

    def action_stop(self) -> None:
        if self.completions.found:
            self.completions.offer([])
            self.composer.completing = False
        elif self.transcript.chosen is not None:
            self._leave_turns()
        elif self.composer.editing is not None:
            self.composer.clear()
            self.set_editing(None)
        elif self.streaming is not None:
            self.streaming.answer.stop()
        elif self.front.summarising is not None:
            self.front.summarising.cancel()

    def action_interrupt(self) -> None:
        selected = self.get_selected_text() or self.composer.selected_text
        if selected:
            self.front.copy(selected, "what was marked")
            self.clear_selection()
        elif self.streaming is not None:
            self.streaming.answer.stop()
        elif time.monotonic() - self._interrupted < 2:
            self.front.leave()
        else:
            self._interrupted = time.monotonic()
            self.notify("Press Ctrl+C again to leave. Everything is stored.", timeout=2)

    @on(Composer.Left)
    def _left(self) -> None:
        self.front.leave()

    def action_suspend(self) -> None:
        self._save_draft()
        self.app.action_suspend_process()

    def action_scroll(self, pages: int) -> None:
        transcript = self.transcript
        if abs(pages) > 1:
            transcript.scroll_to(y=transcript.max_scroll_y if pages > 0 else 0, animate=False)
        else:
            transcript.scroll_to(
                y=transcript.scroll_y + pages * max(1, transcript.size.height - 2), animate=False
            )

    # on a chosen turn

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "turn":
            return self.focused is self.transcript and self.transcript.chosen is not None
        return True

    def action_walk(self, step: int) -> None:
        if self.transcript.move_cursor(step):
            self._code_at = 0
            self.transcript.focus(scroll_visible=False)
        elif step > 0:
            self._leave_turns()
        self.refresh_status()

    def _leave_turns(self) -> None:
        self.transcript.clear_cursor()
        self.composer.focus()
        self.refresh_status()

    def action_turn(self, what: str) -> None:
        entry = self.transcript.chosen
        if isinstance(entry, Question | AnswerEntry):
            try:
                self._on_turn(what, entry)
            except EdgeInferError as error:
                self.trouble(error)

    def _on_turn(self, what: str, entry: Question | AnswerEntry) -> None:
        turn = entry.turn
        match what:
            case "copy":
                self.front.copy(turn.content, "the turn")
            case "code":
                self._copy_next_code(turn)
            case "fold":
                self.transcript.toggle_fold(entry)
            case "prev" | "next":
                self._page(turn.id, 1 if what == "next" else -1)
            case "edit":
                if turn.role != "user":
                    raise UsageError("only a question can be edited", hint="Ctrl+R answers once more")
                self._leave_turns()
                self.front.put_back(turn.content, editing=turn.id)
            case "fork":
                self.session.back_to(turn.id)
                self.session.fork()
                self._leave_turns()
                self.show_session()
                self.notify("A copy of its own, up to there.")

    def _page(self, turn_id: int, step: int) -> None:
        if not self.session.busy and self.session.page(turn_id, step):
            at = self.transcript.cursor
            self.show_session()
            if at is not None:
                self.transcript.cursor = min(at, len(self.transcript.entries) - 1)

    def _copy_next_code(self, turn: Turn) -> None:
        blocks = code_blocks(turn.content)
        if not blocks:
            raise UsageError("there is no code in this turn", hint="")
        self.front.copy(
            blocks[self._code_at % len(blocks)].text, f"code block {self._code_at % len(blocks) + 1}"
        )
        self._code_at += 1

    @on(Transcript.Clicked)
    def _mark_clicked(self, message: Transcript.Clicked) -> None:
        entry, (kind, _, number) = message.entry, message.what.partition(":")
        if kind == "fold":
            self.transcript.toggle_fold(entry)
        elif isinstance(entry, AnswerEntry) and kind == "copy":
            blocks = code_blocks(
                entry.turn.content or (self.streaming.answer.text if self.streaming else "")
            )
            if int(number) <= len(blocks):
                self.front.copy(blocks[int(number) - 1].text, f"code block {number}")
        elif kind == "page":
            which, count = self.session.alternatives(entry.turn_id)
            self._page(entry.turn_id, 1 if which < count else 1 - count)
        self.composer.focus()

    def leave(self) -> None:
        """Keep what is there, in the store, before the app ends."""
        if self.session.answer is not None and self.session.busy:
            self.session.answer.flush()
            self.session.answer.abandon()
        self._save_draft()
