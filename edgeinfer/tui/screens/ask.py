"""One line to type: a new title, a file's name, a key."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input


class AskScreen(ModalScreen[str | None]):
    """The answer is what was typed, None when it was left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Leave", show=False)]

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self._title, self._value = title, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet -small") as sheet:
            sheet.border_title = self._title
            sheet.border_subtitle = "Enter takes · Esc leaves"
            field = Input(self._value)
            field.cursor_blink = False
            yield field

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)
