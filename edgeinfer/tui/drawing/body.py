"""Markdown that grows, drawn at one width. What is appended redraws only the last block."""

from __future__ import annotations

from edgeinfer.chat.code import parser
from edgeinfer.tui.drawing.lines import BLANK, Line
from edgeinfer.tui.drawing.markdown import Drawer


class Body:
    """A document and its lines.

    `settled` blocks can no longer change when text is appended behind them.
    """

    def __init__(self, source: str, width: int) -> None:
        self.source = source
        self.width = width
        self._lines: list[Line] = []
        self._settled_lines = 0  # of _lines
        self._settled_chars = 0  # of source
        self._settled_codes = 0
        self._draw()

    @property
    def lines(self) -> list[Line]:
        """The drawn lines; do not change them."""
        return self._lines

    def append(self, text: str) -> int:
        """Add text at the end. The first line that may have changed."""
        self.source += text
        first = self._settled_lines
        self._draw()
        return first

    def redraw(self, width: int | None = None) -> None:
        """Draw everything once more, at another width where one is given."""
        self.width = self.width if width is None else width
        self._settled_lines = self._settled_chars = self._settled_codes = 0
        self._draw()

    def _draw(self) -> None:
        tail = self.source[self._settled_chars :]
        tokens = parser().parse(tail)
        del self._lines[self._settled_lines :]
        last = next(
            (
                i
                for i in range(len(tokens) - 1, -1, -1)
                if tokens[i].level == 0 and tokens[i].nesting >= 0
            ),
            None,
        )
        if last is None:
            return
        begin = tokens[last].map
        drawer = Drawer(self.width, self._settled_codes + 1)
        if last and begin:
            self._add(drawer.draw(tokens[:last]))
            self._settled_lines = len(self._lines)
            self._settled_codes = drawer.next_code - 1
            self._settled_chars += sum(map(len, tail.splitlines(keepends=True)[: begin[0]]))
        self._add(drawer.draw(tokens[last:]))

    def _add(self, lines: list[Line]) -> None:
        if self._lines and lines:
            self._lines.append(BLANK)
        self._lines += lines
