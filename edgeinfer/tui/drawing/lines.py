"""A line of styled text: wrap, cut, indent and label it.

A style is the name of a component class of the transcript, to which the theme gives colours. `link:URL`
is a link.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len

from edgeinfer.safe_text import without_controls
from edgeinfer.tui.textual_internals import divide_line


class Span(NamedTuple):
    """The characters from `start` to before `stop` have `style`; later spans override earlier ones."""

    start: int
    stop: int
    style: str


class Line(NamedTuple):
    """One row on the screen. `fill` styles the row's whole width; "" leaves the background."""

    text: str = ""
    spans: tuple[Span, ...] = ()
    fill: str = ""

    def wrap(self, width: int) -> list[Line]:
        """Break the line between words, or inside too long ones, into lines of `width` cells."""
        text = self.text
        if len(text) <= width and cell_len(text) <= width:
            return [self]
        cuts = [0, *divide_line(text, max(width, 2)), len(text)]
        return [self.cut(a, b, strip=True) for a, b in itertools.pairwise(cuts)]

    def fold(self, width: int) -> list[Line]:
        """Break the line at exactly `width` cells and keep every space, for code."""
        text = self.text
        if len(text) <= width and cell_len(text) <= width:
            return [self]
        cuts, cells = [0], 0
        for index, character in enumerate(text):
            size = cell_len(character)
            if cells + size > width:
                cuts.append(index)
                cells = 0
            cells += size
        cuts.append(len(text))
        return [self.cut(a, b) for a, b in itertools.pairwise(cuts)]

    def cut(self, start: int, stop: int, *, strip: bool = False) -> Line:
        """Return characters `start` to `stop` with their styles; `strip` removes blanks at the end."""
        piece = self.text[start:stop].rstrip() if strip else self.text[start:stop]
        piece_stop = start + len(piece)
        spans = ((max(a, start), min(b, piece_stop), style) for a, b, style in self.spans)
        inside = tuple(Span(a - start, b - start, style) for a, b, style in spans if a < b)
        return Line(piece, inside, self.fill)

    def with_base_style(self, style: str) -> Line:
        """Give the whole line a style, which its spans override."""
        return self._replace(spans=(Span(0, len(self.text), style), *self.spans))

    def prefix(self, prefix: str, style: str = "", fill: str | None = None) -> Line:
        """Put `prefix` before the line; `fill` replaces the line's `fill`."""
        shift = len(prefix)
        moved = tuple(Span(a + shift, b + shift, s) for a, b, s in self.spans)
        if style:
            moved = (Span(0, shift, style), *moved)
        return Line(prefix + self.text, moved, self.fill if fill is None else fill)

    def label_right(self, label: str, style: str, width: int) -> Line:
        """Put `label` at the right edge, if the line leaves enough room."""
        gap = width - cell_len(self.text) - cell_len(label)
        if gap < 1:
            return self
        start = len(self.text) + gap
        spans = (*self.spans, Span(start, start + len(label), style))
        return Line(f"{self.text}{' ' * gap}{label}", spans, self.fill)


BLANK = Line()


def clean(text: str) -> str:
    """Remove control characters; tabs become spaces, newlines stay."""
    return without_controls(text).replace("\t", "    ")


def style_line(text: str, style: str) -> Line:
    return Line(text, (Span(0, len(text), style),) if text else ())


def hanging_indent(lines: Iterable[Line], first: str, style: str = "") -> list[Line]:
    """Put `first` before the first line, and blanks of its width before the others."""
    blank = " " * cell_len(first)
    return [
        line.prefix(first if i == 0 else blank, style if i == 0 else "") for i, line in enumerate(lines)
    ]
