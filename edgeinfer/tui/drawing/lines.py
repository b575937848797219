"""Lines of styled text, which can be wrapped, cut, indented and labelled.

A style is the name of a component class of the transcript, to which the theme gives colours; the style
`link:URL` makes a link.
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
        """Break the line between words, or inside too long words, into lines of up to `width` cells."""
        text = self.text
        if len(text) <= width and cell_len(text) <= width:
            return [self]
        cuts = [0, *divide_line(text, max(width, 2)), len(text)]
        return [self.cut(a, b, strip=True) for a, b in itertools.pairwise(cuts)]

    def fold(self, width: int) -> list[Line]:
        """Break a line of code every `width` cells; unlike `wrap`, keep all spaces."""
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
        """Return characters `start` to `stop` - 1, with styles; `strip` removes blanks at the end."""
        piece = self.text[start:stop].rstrip() if strip else self.text[start:stop]
        piece_stop = start + len(piece)
        spans = ((max(a, start), min(b, piece_stop), style) for a, b, style in self.spans)
        inside = tuple(Span(a - start, b - start, style) for a, b, style in spans if a < b)
        return Line(piece, inside, self.fill)

    def with_base_style(self, style: str) -> Line:
        """Return the line with `style` for all its characters; the spans override that style."""
        return self._replace(spans=(Span(0, len(self.text), style), *self.spans))

    def prefix(self, prefix: str, style: str = "", fill: str | None = None) -> Line:
        """Return the line with `prefix` first; `fill` (None: unchanged) replaces the line's `fill`."""
        shift = len(prefix)
        moved = tuple(Span(a + shift, b + shift, s) for a, b, s in self.spans)
        if style:
            moved = (Span(0, shift, style), *moved)
        return Line(prefix + self.text, moved, self.fill if fill is None else fill)

    def label_right(self, label: str, style: str, width: int) -> Line:
        """Return the line with `label` at the right edge; unchanged if both do not fit into `width`."""
        gap = width - cell_len(self.text) - cell_len(label)
        if gap < 1:
            return self
        start = len(self.text) + gap
        spans = (*self.spans, Span(start, start + len(label), style))
        return Line(f"{self.text}{' ' * gap}{label}", spans, self.fill)


BLANK = Line()


def clean(text: str) -> str:
    """Return `text` without control characters; tabs become spaces, newlines stay."""
    return without_controls(text).replace("\t", "    ")


def style_line(text: str, style: str) -> Line:
    return Line(text, (Span(0, len(text), style),) if text else ())


def hanging_indent(lines: Iterable[Line], first: str, style: str = "") -> list[Line]:
    """Put `first` before the first line, and as many blanks before each other line."""
    blank = " " * cell_len(first)
    return [
        line.prefix(first if i == 0 else blank, style if i == 0 else "") for i, line in enumerate(lines)
    ]
