"""A dialog to choose from a list, and the help on commands and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from edgeinfer.chat import commands as slash
from edgeinfer.tui.bindings import BY_ID, HEADINGS, KEYS, format_keys
from edgeinfer.tui.drawing.lines import Line, Span
from edgeinfer.tui.textual_internals import keymap

Answer = TypeVar("Answer")


def dialog_frame(title: str, keys: str, *, small: bool = False) -> Vertical:
    """Return a dialog's frame, with `title` in its upper border and `keys` in its lower one."""
    frame = Vertical(classes="sheet -small" if small else "sheet")
    frame.border_title, frame.border_subtitle = title, keys
    return frame


class Dialog(ModalScreen[Answer]):
    """A dialog that Esc and Ctrl+C leave without an answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", show=False),
        Binding(BY_ID["copy-or-quit"].keys, "leave", show=False, priority=True, id="copy-or-quit"),
    ]

    def action_leave(self) -> None:
        self.dismiss(None)


class ListScreen(Dialog[Answer]):
    """A text field over a list: Up and Down move in the list while the field has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "step(1)", "Next", show=False, priority=True),
        Binding("up", "step(-1)", "Before", show=False, priority=True),
    ]

    def make_field(self, placeholder: str, text: str = "") -> Input:
        """Make the screen's text field, whose cursor does not blink."""
        field = Input(text, placeholder=placeholder, id="words")
        field.cursor_blink = False
        return field

    @property
    def selected_index(self) -> int:
        """Index of the selected row, -1 if there is none."""
        highlighted = self.query_one(OptionList).highlighted
        return -1 if highlighted is None else highlighted

    def action_step(self, by: int) -> None:
        listed = self.query_one(OptionList)
        if listed.option_count:
            listed.highlighted = min(max(self.selected_index + by, 0), listed.option_count - 1)


class ChoiceScreen(Dialog[str | None]):
    """Asks to choose from `choices` (id, label, explanation); returns the id, None after Esc."""

    def __init__(self, title: str, text: str, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._choices = choices

    def compose(self) -> ComposeResult:
        with dialog_frame(self._title, "Enter takes · Esc leaves", small=True):
            yield Static(self._text, classes="text", markup=False)
            yield OptionList(
                *(
                    Option(Content.assemble(label, "\n", (f"  {meaning}", "dim")), id=name)
                    for name, label, meaning in self._choices
                ),
                classes="choices",
            )

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class HelpScreen(Dialog[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,f1", "leave", "Leave", show=False)]

    def compose(self) -> ComposeResult:
        with dialog_frame("Help", "↑↓ scroll · Esc leaves"):
            with VerticalScroll() as scroll:
                yield Static("", id="help")
            scroll.can_focus = True

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def on_resize(self) -> None:
        width = self.query_one(VerticalScroll).scrollable_content_region.width
        self.query_one("#help", Static).update(help_content(keymap(self.app), width))


def help_content(rebound: dict[str, str], width: int) -> Content:
    """Return the help on all commands and keys. `rebound`: keys set by the user, by binding id."""
    rows = [[("Commands", "bold $primary")]]
    for command in slash.COMMANDS:
        also = f"also /{', /'.join(command.aliases)}" if command.aliases else ""
        rows.append(_row(command.usage, command.summary, also, width))
    mention = "attach text, a document or a picture, anywhere in a question"
    rows.append(_row("@PATH", mention, "", width))
    for where, heading in HEADINGS.items():
        rows.append([(f"\n{heading}", "bold $primary")])
        keys = (k for k in KEYS if k.where == where)
        rows += [_row(format_keys(rebound.get(k.id, k.keys)), k.tooltip, k.id, width) for k in keys]
    rows.append([("\nconfig.toml rebinds keys by their names, under [chat.keys].", "dim")])
    return Content("\n").join([Content.assemble(*parts) for parts in rows])


def _row(label: str, meaning: str, note: str, width: int) -> list[tuple[str, str]]:
    column = 30 if width >= 80 else 24
    new_line = f"\n{' ' * column}"
    head = f"  {label}{new_line}" if len(label) + 3 > column else f"  {label}".ljust(column)
    parts = [(head, "$accent")]
    text = f"{meaning}  {note}".rstrip()
    line = Line(text, (Span(len(meaning), len(text), "dim"),))
    for index, piece in enumerate(line.wrap(max(width - column - 2, 20))):
        start = piece.spans[0].start if piece.spans else len(piece.text)
        parts.append(((new_line if index else "") + piece.text[:start], ""))
        parts.append((piece.text[start:], "dim"))
    return parts
