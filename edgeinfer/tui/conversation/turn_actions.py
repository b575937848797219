"""What keys and the mouse do to turns in the transcript: walk, copy, fold, page, edit, fork."""

from __future__ import annotations

from edgeinfer.chat.formats import code_blocks
from edgeinfer.chat.history.values import Turn
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.tui.conversation.front import AppFront
from edgeinfer.tui.conversation.view import View
from edgeinfer.tui.drawing.entry import AnswerEntry, Question
from edgeinfer.tui.widgets.transcript import Transcript


class TurnActions:
    """Acts on the turn that is chosen, or clicked."""

    def __init__(self, view: View, front: AppFront) -> None:
        self._view = view
        self._front = front
        self._session = view.session
        self._transcript = view.transcript
        self._code_at = 0

    def walk(self, step: int) -> None:
        """Choose the turn before (-1) or after (1); past the last one, go back to typing."""
        if self._transcript.move_cursor(step):
            self._code_at = 0
            self._transcript.focus(scroll_visible=False)
        elif step > 0:
            self.leave()
        self._view.refresh_status()

    def leave(self) -> None:
        """Choose no turn, and go back to typing."""
        self._transcript.clear_cursor()
        self._view.composer.focus()
        self._view.refresh_status()

    def act(self, what: str) -> None:
        """Do `what` to the chosen turn; what goes wrong is shown."""
        entry = self._transcript.chosen
        if isinstance(entry, Question | AnswerEntry):
            try:
                self._act(what, entry)
            except EdgeInferError as error:
                self._view.show_error(error)

    def _act(self, what: str, entry: Question | AnswerEntry) -> None:
        turn = entry.turn
        match what:
            case "copy":
                self._front.copy(turn.content, "the turn")
            case "code":
                self._copy_next_code(turn)
            case "fold":
                self._transcript.toggle_fold(entry)
            case "prev" | "next":
                self._page(turn.id, 1 if what == "next" else -1)
            case "edit":
                if turn.role != "user":
                    raise UsageError("only a question can be edited", hint="Ctrl+R answers once more")
                self.leave()
                self._front.put_back(turn.content, editing=turn.id)
            case "fork":
                self._session.back_to(turn.id)
                self._session.fork()
                self.leave()
                self._view.show_session()
                self._transcript.notify("A copy of its own, up to there.")

    def _page(self, turn_id: int, step: int) -> None:
        if not self._session.busy and self._session.page(turn_id, step):
            at = self._transcript.cursor
            self._view.show_session()
            if at is not None:
                self._transcript.cursor = min(at, len(self._transcript.entries) - 1)

    def _copy_next_code(self, turn: Turn) -> None:
        blocks = code_blocks(turn.content)
        if not blocks:
            raise UsageError("there is no code in this turn", hint="")
        index = self._code_at % len(blocks)
        self._front.copy(blocks[index].text, f"code block {index + 1}")
        self._code_at += 1

    def click(self, message: Transcript.Clicked) -> None:
        """Fold, copy or page, as the mark says that was clicked."""
        entry = message.entry
        kind, _, number = message.what.partition(":")
        if kind == "fold":
            self._transcript.toggle_fold(entry)
        elif kind == "copy" and isinstance(entry, AnswerEntry):
            self._copy_code(entry, int(number))
        elif kind == "page":
            which, count = self._session.alternatives(entry.turn_id)
            self._page(entry.turn_id, 1 if which < count else 1 - count)
        self._view.composer.focus()

    def _copy_code(self, entry: AnswerEntry, number: int) -> None:
        text = entry.turn.content
        if not text and self._view.streaming is not None:
            text = self._view.streaming.answer.text
        blocks = code_blocks(text)
        if number <= len(blocks):
            self._front.copy(blocks[number - 1].text, f"code block {number}")
