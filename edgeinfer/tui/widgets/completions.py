"""The list above the composer: commands, their arguments, and paths that fit what is typed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edgeinfer.chat.commands.complete import Completion


class Completions(OptionList, can_focus=False):
    """Shows completions while there are some; the composer keeps the focus."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self.found: list[Completion] = []

    def offer(self, found: Sequence[Completion]) -> None:
        """Show these, the first one chosen; none hides the list."""
        if list(found) == self.found:
            return
        self.found = list(found)
        self.clear_options()
        width = max((len(c.label) for c in self.found), default=0)
        self.add_options(
            Option(Content.assemble(c.label.ljust(width + 2), (c.summary, "dim"))) for c in self.found
        )
        self.display = bool(self.found)
        if self.found:
            self.highlighted = 0

    def step(self, by: int) -> None:
        """Choose the next or the one before, around the ends."""
        if self.found:
            self.highlighted = ((self.highlighted or 0) + by) % len(self.found)

    @property
    def choice(self) -> Completion | None:
        """The chosen one."""
        return self.found[self.highlighted] if self.found and self.highlighted is not None else None
