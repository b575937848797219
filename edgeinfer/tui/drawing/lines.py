"""A line of text with named styles: wrap it, indent it, pad it, cut it.

The names are the transcript's component classes, so the theme sets their colours; `link:URL` is a link.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len

from edgeinfer.safe_text import without_controls
from edgeinfer.tui.textual_internals import divide_line


class Span(NamedTuple):
    """Characters `start` to `stop` have `style`; later spans override earlier ones."""

    start: int
    stop: int
    style: str


class Line(NamedTuple):
    """One row of the screen. `fill` is the style of its whole width, "" for the background."""

    text: str = ""
    spans: tuple[Span, ...] = ()
    fill: str = ""


BLANK = Line()


def clean(text: str) -> str:
    """Remove control characters; tabs become spaces, newlines stay."""
    return without_controls(text).replace("\t", "    ")


def style_line(text: str, style: str) -> Line:
    return Line(text, (Span(0, len(text), style),) if text else ())


def wrap(line: Line, width: int) -> list[Line]:
    """Break a line at words, and inside words that are too long, into pieces of up to `width` cells."""
    text = line.text
    if len(text) <= width and cell_len(text) <= width:
        return [line]
    cuts = [0, *divide_line(text, max(width, 2)), len(text)]
    return [cut(line, a, b, strip=True) for a, b in itertools.pairwise(cuts)]


def fold(line: Line, width: int) -> list[Line]:
    """Break a line exactly at `width` cells: for code, whose spaces count."""
    text = line.text
    if len(text) <= width and cell_len(text) <= width:
        return [line]
    cuts, cells = [0], 0
    for index, character in enumerate(text):
        size = cell_len(character)
        if cells + size > width:
            cuts.append(index)
            cells = 0
        cells += size
    cuts.append(len(text))
    return [cut(line, a, b) for a, b in itertools.pairwise(cuts)]


def cut(line: Line, start: int, stop: int, *, strip: bool = False) -> Line:
    """Return characters `start` to `stop` with their styles; `strip` removes blanks at the end."""
    piece = line.text[start:stop].rstrip() if strip else line.text[start:stop]
    piece_stop = start + len(piece)
    spans = ((max(a, start), min(b, piece_stop), style) for a, b, style in line.spans)
    inside = tuple(Span(a - start, b - start, style) for a, b, style in spans if a < b)
    return Line(piece, inside, line.fill)


def under(line: Line, style: str) -> Line:
    """Apply `style` below the line's own styles."""
    return line._replace(spans=(Span(0, len(line.text), style), *line.spans))


def prefix_line(line: Line, prefix: str, style: str = "", fill: str | None = None) -> Line:
    """Put `prefix` before a line."""
    shift = len(prefix)
    moved = tuple(Span(a + shift, b + shift, s) for a, b, s in line.spans)
    if style:
        moved = (Span(0, shift, style), *moved)
    return Line(prefix + line.text, moved, line.fill if fill is None else fill)


def hung(lines: Iterable[Line], first: str, style: str = "") -> list[Line]:
    """Put `first` before the first line and as many blank cells before the others."""
    blank = " " * cell_len(first)
    return [
        prefix_line(line, first if i == 0 else blank, style if i == 0 else "")
        for i, line in enumerate(lines)
    ]


def right(line: Line, label: str, style: str, width: int) -> Line:
    """Put `label` at the line's right edge, if there is enough room."""
    gap = width - cell_len(line.text) - cell_len(label)
    if gap < 1:
        return line
    start = len(line.text) + gap
    spans = (*line.spans, Span(start, start + len(label), style))
    return Line(f"{line.text}{' ' * gap}{label}", spans, line.fill)
