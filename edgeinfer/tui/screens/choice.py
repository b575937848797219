"""Questions: with a few answers, or with one line to type (a new title, a file's name, a key)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option


def sheet(title: str, keys: str, *, small: bool = False) -> Vertical:
    """Return a screen's frame with its title, and its keys at the bottom."""
    frame = Vertical(classes="sheet -small" if small else "sheet")
    frame.border_title, frame.border_subtitle = title, keys
    return frame


class ChoiceScreen(ModalScreen[str | None]):
    """`choices` are (id, label, what it means); the answer is an id, None when it was left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Leave", show=False)]

    def __init__(self, title: str, text: str, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._choices = choices

    def compose(self) -> ComposeResult:
        with sheet(self._title, "Enter takes · Esc leaves", small=True):
            yield Static(self._text, classes="text", markup=False)
            yield OptionList(
                *(
                    Option(Content.assemble(label, "\n", (f"  {meaning}", "dim")), id=name)
                    for name, label, meaning in self._choices
                ),
                classes="choices",
            )

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class AskScreen(ModalScreen[str | None]):
    """The answer is what was typed, None when it was left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Leave", show=False)]

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self._title, self._value = title, value

    def compose(self) -> ComposeResult:
        with sheet(self._title, "Enter takes · Esc leaves", small=True):
            field = Input(self._value)
            field.cursor_blink = False
            yield field

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)
