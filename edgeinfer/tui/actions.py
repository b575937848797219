"""Run commands, keys and mouse clicks on the chat screen."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from textual.app import App, SuspendNotSupported

from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.commander import Commander, stats_text
from edgeinfer.chat.commands import Names
from edgeinfer.chat.formats import code_blocks
from edgeinfer.chat.history.values import Attachment, Turn
from edgeinfer.chat.presets import describe
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.config.config_file import save
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.tui.answering import Answering
from edgeinfer.tui.composer import AttachmentList
from edgeinfer.tui.drawing.entry import AnswerEntry, Question, Remark, TurnEntry
from edgeinfer.tui.transcript import Transcript
from edgeinfer.tui.view import ChatView

T = TypeVar("T")


@dataclass(eq=False)
class AppFrontEnd:
    """Runs `/` commands on the chat screen. Other screens are imported on first use.

    `leave` is called for `/quit`.
    """

    app: App[Any]
    setup: ChatSetup
    view: ChatView
    answering: Answering
    attachments: AttachmentList
    leave: Callable[[], None]

    def __post_init__(self) -> None:
        self.session = self.view.session
        #: Name of the model that is being loaded because the opened conversation uses it; "" if the
        #: user chose the model.
        self.followed = ""
        self.commander = Commander(self.session, self, self.setup.config, self.setup.tools)

    def show_text(self, text: str) -> None:
        self.view.add_remark(Remark(text))

    def show_changed(self) -> None:
        self.view.composer.editing = None
        if self.session.retries_after_shortening:
            self.answering.answer_after_shortening()
        else:
            if not self.view.composer.text:
                self.show_draft()
            self.view.show_session()

    def show_draft(self, typed: str = "") -> None:
        """Put `typed`, then the open conversation's draft, into the input field.

        The draft is left out if another window has locked it.
        """
        draft = self.session.conversation.draft if self.session.owns_draft() else ""
        self.view.composer.fill(typed, draft)

    def show_answer(self, answer: AnswerWriter) -> None:
        self.answering.stream(answer)

    def answer_edited(self, turn: Turn) -> None:
        self.view.show_session()
        self.answering.answer_question()

    def put_back(self, text: str, editing: int | None = None) -> None:
        self.view.composer.editing = editing
        self.view.composer.fill(text)
        self.view.composer.focus()

    def attach(self, attachment: Attachment) -> None:
        self.attachments.add(attachment)

    def copy(self, text: str, label: str) -> None:
        _copy(self.app, text)
        self.app.notify(f"Copied {label}.", timeout=2)

    def fold_reasoning(self) -> None:
        entries = self.view.transcript.entries
        answers = [e for e in entries if isinstance(e, AnswerEntry) and e.can_unfold]
        questions = [e for e in entries if isinstance(e, Question)]
        last = (answers or questions)[-1:]
        if not last or not self.view.transcript.toggle_fold(last[0]):
            raise UsageError("there is no reasoning to show", hint="ask a model that reasons")

    def wait_for(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self.answering.wait_for(work, then)

    def use_model(self, name: str, n_ctx: int | None = None) -> None:
        self.session.refuse_busy()
        self._load(name or self.view.model, n_ctx)

    def pick_model(self, model: str = "", *, first: bool = False) -> None:
        """Open the model picker for the requested `model` ("": the present one).

        `first`: the requested model is not on this machine.
        """
        from edgeinfer.tui.screens.model_picker import ModelScreen

        if any(isinstance(screen, ModelScreen) for screen in self.app.screen_stack):
            return  # the picker is already open, and a question was sent before it was painted
        screen = ModelScreen(self.setup, model or self.view.model, first=first)
        self.app.push_screen(screen, lambda name: self._model_picked(name, screen.question))

    def _model_picked(self, name: str | None, question: str) -> None:
        if name:
            self.attempt(lambda: self.use_model(name))
        elif self.answering.unanswered and not self.view.loader.progress:
            self.show_text("The question will be answered once a model is pulled: /model")
        self.view.composer.insert(question)
        self.view.composer.focus()

    def _load(self, name: str, n_ctx: int | None = None) -> None:
        self.followed = ""
        self.session.use_engine(None, "")  # the load closes the engine, so no more questions go to it
        self.view.loader.start(name, n_ctx)
        self.view.refresh_status()

    def follow_model(self) -> None:
        model = self.session.conversation.model
        if model not in ("", self.view.loader.loading or self.session.loaded_model):
            self._load(model)
            self.followed = model

    def pick_session(self, query: str) -> None:
        from edgeinfer.tui.screens.sessions import SessionScreen

        screen = SessionScreen(self.session, self.commander, query)
        self.app.push_screen(screen, self._session_picked)

    def _session_picked(self, conversation_id: int | None) -> None:
        if conversation_id is not None:
            stored = self.session.conversation.draft
            try:
                self.session.open(conversation_id)
            except EdgeInferError as error:
                self.view.show_error(error)
                return
            self.follow_model()
            self.view.composer.editing = None
            typed = self.view.composer.text
            self.show_draft("" if typed == stored else typed)
        self.view.show_session()

    def summarise(self, first_sent: Turn) -> None:
        self.answering.summarise(first_sent)

    def show_help(self) -> None:
        from edgeinfer.tui.screens.dialogs import HelpScreen

        self.app.push_screen(HelpScreen())

    def show_stats(self) -> None:
        self.show_text(stats_text(self.session, self.view.loader.start_text))

    def use_theme(self, name: str) -> None:
        if not name:
            self._pick_theme()
        else:
            self.app.theme = name
            save(("chat", "theme"), name)

    def _pick_theme(self) -> None:
        from edgeinfer.tui.screens.dialogs import ChoiceScreen

        themes = sorted(self.app.available_themes.items())
        themes.sort(key=lambda item: not item[0].startswith("edgeinfer"))
        choices = [(name, name, "dark" if theme.dark else "light") for name, theme in themes]
        self.app.push_screen(ChoiceScreen("Theme", "", choices), self._theme_picked)

    def _theme_picked(self, name: str | None) -> None:
        if name:
            self.attempt(lambda: self.use_theme(name))

    def attempt(self, action: Callable[[], object]) -> None:
        """Run `action`, and show the error that it raises, if any."""
        try:
            action()
        except EdgeInferError as error:
            self.view.show_error(error)

    def edit_outside(self) -> None:
        composer = self.view.composer
        composer.fill(_edit(self.app, composer.text))

    def names(self) -> Names:
        """Return, for each kind of command argument, a function that lists the possible values."""
        return {
            "model": _models,
            "prompt": lambda: [
                (n, " ".join(t.split("\n"))[:60]) for n, t in self.commander.prompts.items()
            ],
            "preset": lambda: [(n, describe(v)) for n, v in self.commander.presets.items()],
        }


def _models() -> Sequence[tuple[str, str]]:
    from edgeinfer.models.catalog import load_catalog  # imported here: the import takes 10 ms
    from edgeinfer.models.store import list_pulled

    try:
        pulled = {model.name: "pulled" for model in list_pulled()}
        catalog = {m.name: f"{m.parameters} · {m.licence}" for m in load_catalog().values()}
    except EdgeInferError:
        return []
    return [*(pulled | catalog | pulled).items()]  # the pulled models first


def _copy(app: App[Any], text: str) -> None:
    """Copy by the escape sequence OSC 52, also over SSH; in tmux, which drops it, by tmux's buffer."""
    app.copy_to_clipboard(text)
    if os.environ.get("TMUX") and (tmux := shutil.which("tmux")):
        command = [tmux, "load-buffer", "-w", "-"]
        subprocess.run(command, input=text.encode(), timeout=2, check=False, capture_output=True)


def _edit(app: App[Any], text: str) -> str:
    """Return `text` as edited in $VISUAL, $EDITOR or vi. Raises UsageError if the editor fails."""
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    fd, name = tempfile.mkstemp(prefix="edgeinfer-", suffix=".md")
    path = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        _run_editor(app, [*command, name])
        return path.read_text("utf-8").rstrip("\n")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        message = f"{command[0]} saved no UTF-8 text, so the typed text is unchanged"
        raise UsageError(message, hint="save the file as UTF-8, under the same name") from error
    finally:
        path.unlink(missing_ok=True)


def _run_editor(app: App[Any], command: list[str]) -> None:
    failure = ""
    try:
        with app.suspend():
            try:
                status = subprocess.run(command, stdin=0, stdout=0, check=False).returncode
                failure = f"exited with {status}; the text was not changed" if status else ""
            except OSError as error:  # must not leave the block: Textual would not resume the app
                failure = f"cannot be started: {error.strerror}"
    except SuspendNotSupported as error:
        raise UsageError("this terminal cannot run an editor", hint="type the text here") from error
    if failure:
        raise UsageError(f"{command[0]} {failure}", hint="set $EDITOR to another editor")


class TurnActions:
    """Runs actions on a turn that was selected by keys or clicked."""

    def __init__(self, view: ChatView, front: AppFrontEnd) -> None:
        self._view = view
        self._front = front
        self._session = view.session
        self._transcript = view.transcript
        self._code_at = 0

    def walk(self, step: int) -> None:
        """Select the previous (-1) or next (1) turn; after the last one, focus the input field."""
        if self._transcript.move_cursor(step):
            self._code_at = 0
            self._transcript.focus(scroll_visible=False)
        elif step > 0:
            self.leave()
        self._view.refresh_status()

    def leave(self) -> None:
        """Clear the selection, and focus the input field."""
        self._transcript.select(None)
        self._view.composer.focus()
        self._view.refresh_status()

    def act(self, action: str) -> None:
        """Run `action`, e.g. "copy", on the selected turn, if any; show the error if it fails."""
        entry = self._transcript.selection
        if isinstance(entry, TurnEntry):
            self._front.attempt(lambda: self._act(action, entry))

    def _act(self, action: str, entry: TurnEntry) -> None:
        turn = entry.turn
        match action:
            case "copy":
                self._front.copy(turn.content, "the turn")
            case "code":
                self._copy_next_code(turn)
            case "fold":
                self._transcript.toggle_fold(entry)
            case "prev" | "next":
                self._show_alternative(turn.id, 1 if action == "next" else -1)
            case "edit":
                if turn.role != "user":
                    raise UsageError("only a question can be edited", hint="Ctrl+R answers again")
                self.leave()
                self._front.put_back(turn.content, editing=turn.id)
            case "fork":
                self._session.back_to(turn.id)
                self._session.fork()
                self.leave()
                self._view.show_session()
                self._transcript.notify("This is a copy of the conversation up to that turn.")

    def _show_alternative(self, turn_id: int, step: int) -> None:
        if not self._session.busy and self._session.show_alternative(turn_id, step):
            cursor = self._transcript.cursor
            self._view.show_session()
            if cursor is not None:
                self._transcript.cursor = min(cursor, len(self._transcript.entries) - 1)

    def _copy_next_code(self, turn: Turn) -> None:
        blocks = code_blocks(turn.content)
        if not blocks:
            raise UsageError("there is no code in this turn", hint="`c` copies the whole turn")
        index = self._code_at % len(blocks)
        self._front.copy(blocks[index].text, f"code block {index + 1}")
        self._code_at += 1

    def click(self, message: Transcript.Clicked) -> None:
        """Run the action of a clicked label: fold an entry, copy code, or show another alternative."""
        entry = message.entry
        kind, _, number = message.mark.partition(":")
        if kind == "fold":
            self._transcript.toggle_fold(entry)
        elif kind == "copy" and isinstance(entry, AnswerEntry):
            self._copy_code(entry, int(number))
        elif kind == "page":
            which, count = self._session.alternatives(entry.turn_id)
            self._show_alternative(entry.turn_id, 1 if which < count else 1 - count)
        self._view.composer.focus()

    def _copy_code(self, entry: AnswerEntry, number: int) -> None:
        text = entry.turn.content
        if not text and self._view.streaming is not None:
            text = self._view.streaming.answer.text
        blocks = code_blocks(text)
        if number <= len(blocks):
            self._front.copy(blocks[number - 1].text, f"code block {number}")
