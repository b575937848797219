"""What the commands ask of the app: the Textual side of `chat.commander.Front`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgeinfer.chat import context
from edgeinfer.chat.answer import Answer
from edgeinfer.chat.commander import stats_text
from edgeinfer.chat.complete import Names
from edgeinfer.chat.presets import describe
from edgeinfer.chat.settings import save
from edgeinfer.chat.values import Attachment, Turn
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.interface import Generation
from edgeinfer.tui import clipboard, editing
from edgeinfer.tui.drawing.entry import AnswerEntry, Question, Remark

if TYPE_CHECKING:
    from edgeinfer.tui.screens.chat import ChatScreen


class AppFront:
    """Bound to the chat screen. Screens are imported when first shown: `tui.preload` has them in a
    parked process.
    """

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self.summarising: Generation | None = None

    # words and turns

    def say(self, text: str) -> None:
        self._screen.remark(Remark(text))

    def changed(self) -> None:
        screen = self._screen
        screen.set_editing(None)
        if context_was_cut(screen):
            screen.room_made()
        else:
            screen.show_session()

    def answering(self, answer: Answer) -> None:
        self._screen.stream(answer)

    def ask_edited(self, turn: Turn) -> None:
        self._screen.show_session()
        self._screen.answer_question()

    def put_back(self, text: str, editing: int | None = None) -> None:
        self._screen.composer.fill(text)
        self._screen.set_editing(editing)
        self._screen.composer.focus()

    def attach(self, attachment: Attachment) -> None:
        self._screen.attaching.add(attachment)

    def copy(self, text: str, what: str) -> None:
        clipboard.copy(self._screen.app, text)
        self._screen.notify(f"Copied {what}.", timeout=2)

    def fold_reasoning(self) -> None:
        entries = [
            e for e in self._screen.transcript.entries if isinstance(e, AnswerEntry) and e.has_reasoning
        ]
        long = [e for e in self._screen.transcript.entries if isinstance(e, Question)]
        if not self._screen.transcript.toggle_fold(
            entries[-1] if entries else long[-1] if long else None
        ):
            raise UsageError("there is no reasoning to unfold", hint="")

    # models

    def use_model(self, name: str, n_ctx: int | None = None) -> None:
        if self._screen.session.busy:
            raise UsageError("an answer is being written", hint="stop it first: Esc")
        self._screen.loader.start(name, n_ctx)

    def pick_model(self) -> None:
        from edgeinfer.tui.screens.model_picker import ModelScreen

        current = self._screen.session.conversation.model
        self._screen.app.push_screen(ModelScreen(self._screen.launch, current), self._model_picked)

    def offer_pull(self, model: str) -> None:
        """No model yet: the first screen."""
        from edgeinfer.tui.screens.model_picker import ModelScreen

        self._screen.app.push_screen(
            ModelScreen(self._screen.launch, model, first=True), self._model_picked
        )

    def _model_picked(self, name: str | None) -> None:
        if name:
            self._screen.loader.start(name)
        self._screen.composer.focus()

    # conversations

    def pick_session(self, words: str) -> None:
        from edgeinfer.tui.screens.sessions import SessionScreen

        screen = self._screen
        screen.app.push_screen(
            SessionScreen(screen.session, screen.commander, words), self._session_picked
        )

    def _session_picked(self, conversation_id: int | None) -> None:
        screen = self._screen
        if conversation_id is not None:
            try:
                screen.session.open(conversation_id)
            except EdgeInferError as error:
                screen.trouble(error)
                return
            if screen.session.conversation.draft:
                screen.composer.fill(screen.session.conversation.draft)
        screen.show_session()

    def summarise(self, kept: Turn) -> None:
        engine = self._screen.session.engine
        if engine is None or self.summarising is not None:
            return
        self.summarising = engine.submit(context.summary_request(self._screen.session, engine, kept))
        self._screen.run_worker(self._summarise(self.summarising, kept), group="answer")

    async def _summarise(self, generation: Generation, kept: Turn) -> None:
        screen = self._screen
        conversation = screen.session.conversation.id
        try:
            text = "".join(
                [event.text async for event in generation if isinstance(event, TextDelta)]
            ).strip()
            if text and screen.session.conversation.id == conversation:
                screen.session.cut(kept.id, text)
                screen.room_made()
        except EdgeInferError as error:
            screen.trouble(error)
        finally:
            self.summarising = None
            screen.refresh_status()

    # the program

    def show_help(self, command: str) -> None:
        from edgeinfer.tui.screens.help import HelpScreen

        self._screen.app.push_screen(HelpScreen(command))

    def show_settings(self) -> None:
        from edgeinfer.tui.screens.settings import SettingsScreen

        self._screen.app.push_screen(SettingsScreen(self._screen))

    def show_stats(self) -> None:
        self.say(stats_text(self._screen.session, self._screen.app.started))

    def use_theme(self, name: str) -> None:
        app = self._screen.app
        if not name:
            app.search_themes()
            return
        if name not in app.available_themes:
            raise UsageError(
                f"there is no theme {name!r}",
                hint=f"there are: {', '.join(sorted(app.available_themes))}",
            )
        app.theme = name
        save(("chat", "theme"), name)

    def edit_outside(self) -> None:
        composer = self._screen.composer
        composer.fill(editing.edit(self._screen.app, composer.text))

    def leave(self) -> None:
        self._screen.app.leave()

    # names for completion

    def names(self) -> Names:
        """What an argument of each kind can be."""
        return {
            "model": self._models,
            "prompt": self._prompts,
            "preset": self._presets,
            "theme": self._themes,
        }

    def _models(self) -> Sequence[tuple[str, str]]:
        from edgeinfer.catalog.models import load_catalog  # 10 ms, once `/model ` is typed

        try:
            return [(m.name, f"{m.parameters} · {m.licence}") for m in load_catalog().models.values()]
        except EdgeInferError:
            return []

    def _prompts(self) -> Sequence[tuple[str, str]]:
        return [
            (name, text.replace("\n", " ")[:60])
            for name, text in self._screen.commander.prompts.items()
        ]

    def _presets(self) -> Sequence[tuple[str, str]]:
        return [(name, describe(values)) for name, values in self._screen.commander.presets.items()]

    def _themes(self) -> Sequence[tuple[str, str]]:
        return [(name, "") for name in sorted(self._screen.app.available_themes)]


def context_was_cut(screen: ChatScreen) -> bool:
    """Whether the last command was a cut that a question waits for."""
    head = screen.session.head
    waits = (
        head is not None and head.role == "assistant" and head.status == "failed" and not head.content
    )
    return waits and any(t.cut_summary is not None for t in screen.session.path)
