"""The list of conversations, in which the user can search, open, delete and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from edgeinfer.chat.commander import Commander
from edgeinfer.chat.history.store import MARK, UNMARK
from edgeinfer.chat.history.values import Summary
from edgeinfer.chat.session import ChatSession
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError
from edgeinfer.tui.bindings import bindings
from edgeinfer.tui.drawing.lines import clean
from edgeinfer.tui.screens.dialogs import ListScreen, dialog_frame


class SessionScreen(ListScreen[int | None]):
    """Lists conversations; returns the id of the one to open, None after Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("sessions")]

    def __init__(self, session: ChatSession, commander: Commander, query: str = "") -> None:
        super().__init__()
        self.session = session
        self.commander = commander
        self._query = query
        self.summaries: list[Summary] = []

    def compose(self) -> ComposeResult:
        with dialog_frame("Conversations", "Enter open · ^D delete · ^U undo"):
            yield self.make_field("Search", self._query)
            yield OptionList(id="found")

    def on_mount(self) -> None:
        self._search()
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _search(self) -> None:
        query = self.query_one(Input).value
        try:
            store = self.session.store
            self.summaries = store.search(query) if query.strip() else store.listing()
        except EdgeInferError as error:
            self._show_error(error)
            return
        listed = self.query_one(OptionList)
        listed.clear_options()
        room = max(20, self.app.size.width * 9 // 10 - 36)
        listed.add_options(
            Option(_row(s, self.session.store.clock(), room), id=str(s.id)) for s in self.summaries
        )
        if self.summaries:
            listed.highlighted = 0
        listed.border_title = ""

    @property
    def selection(self) -> Summary | None:
        index = self.selected_index
        return self.summaries[index] if 0 <= index < len(self.summaries) else None

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _open(self) -> None:
        if self.selection is not None:
            self.dismiss(self.selection.id)

    def action_delete(self) -> None:
        chosen = self.selection
        if chosen is not None and self._run(lambda: self.commander.delete(chosen.id)):
            self.notify(f"Deleted “{chosen.title}”. Ctrl+U restores it.", timeout=4)
            self._search()

    def action_undelete(self) -> None:
        if self._run(self.commander.undelete):
            self._search()

    def _run(self, action: Callable[[], object]) -> bool:
        """Run `action` and return True; if it fails, show the error and return False."""
        try:
            action()
        except EdgeInferError as error:
            self._show_error(error)
            return False
        return True

    def _show_error(self, error: EdgeInferError) -> None:
        self.notify(f"{error.message}\n{hint(error)}".strip(), severity="error")


def _row(summary: Summary, now_ms: int, room: int) -> Content:
    title = clean(summary.title)
    title = title if len(title) <= room else title[: room - 1] + "…"
    head = Content.assemble(
        (f"{summary.id:>4}  ", "dim"),
        (title, "bold"),
        (f"   {format_age(now_ms - summary.updated_ms)} · {summary.length}", "dim"),
    )
    if not summary.snippet:
        return head
    return Content.assemble(head, "\n      ", _snippet(summary.snippet))


def _snippet(text: str) -> Content:
    parts: list[tuple[str, str]] = []
    for index, piece in enumerate(text.split(MARK)):
        match, _, plain = piece.rpartition(UNMARK) if index else ("", "", piece)
        parts += [(clean(match), "$accent"), (clean(plain), "dim")]
    return Content.assemble(*parts)


def format_age(ms: int) -> str:
    """Format an age (ms): `now`, `5 min`, `3 h`, `12 d`."""
    minutes = ms // 60_000
    if minutes < 1:
        return "now"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} d"
