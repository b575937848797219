"""A table as lines: columns as wide as their words need, narrowed together on a small screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from edgeinfer.tui.drawing.lines import Line, Span, styled, wrap

_GAP = " │ "


def draw_table(rows: Sequence[Sequence[Line]], width: int) -> list[Line]:
    """Header, rule, rows. Every row has as many cells as the header; none is narrower than 4 cells."""
    if not rows or not rows[0]:
        return []
    widths = _column_widths(rows, width)
    lines = _row(rows[0], widths, "table-header")
    lines.append(styled("─┼─".join("─" * w for w in widths), "table-line"))
    for row in rows[1:]:
        lines += _row(row, widths, "")
    return lines


def _column_widths(rows: Sequence[Sequence[Line]], width: int) -> list[int]:
    columns = len(rows[0])
    wanted = [
        max(1, *(cell_len(row[i].text) if i < len(row) else 0 for row in rows)) for i in range(columns)
    ]
    room = width - len(_GAP) * (columns - 1)
    while sum(wanted) > room and max(wanted) > 4:
        excess, widest = sum(wanted) - room, max(wanted)
        second = max((w for w in wanted if w < widest), default=4)
        share = wanted.count(widest)
        cut = max(1, min(widest - max(second, 4), -(-excess // share)))
        wanted = [w - cut if w == widest else w for w in wanted]
    return wanted


def _row(cells: Sequence[Line], widths: Sequence[int], style: str) -> list[Line]:
    wrapped = [wrap(cells[i], w) if i < len(cells) else [Line()] for i, w in enumerate(widths)]
    height = max(map(len, wrapped))
    lines = []
    for y in range(height):
        text, spans = "", []
        for index, (column, w) in enumerate(zip(wrapped, widths, strict=True)):
            if index:
                spans.append(Span(len(text), len(text) + len(_GAP), "table-line"))
                text += _GAP
            cell = column[y] if y < len(column) else Line()
            start = len(text)
            if style:
                spans.append(Span(start, start + len(cell.text), style))
            spans += [Span(a + start, b + start, s) for a, b, s in cell.spans]
            text += cell.text + " " * (w - cell_len(cell.text))
        lines.append(Line(text.rstrip(), tuple(s for s in spans if s.start < len(text.rstrip()))))
    return lines
