"""Markdown as lines of a given width: headings, paragraphs, lists, quotes, tables, code.

Every block a small function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode

from edgeinfer.tui.drawing.code import draw_code
from edgeinfer.tui.drawing.lines import BLANK, Line, Span, clean, hung, prefixed, styled, wrap
from edgeinfer.tui.drawing.table import draw_table

_INLINE = {"em": "em", "strong": "strong", "s": "strike"}
_BULLETS = ("•", "◦", "▪")

#: Links of other kinds are shown as text: a terminal would hand them to programs.
_LINKS = ("http://", "https://", "mailto:")


class Drawer:
    """Draws blocks, counting the code blocks it meets so that each has its number.

    `first_code` is the next one's.
    """

    def __init__(self, width: int, first_code: int = 1) -> None:
        self.width = max(width, 10)
        self.next_code = first_code

    def draw(self, tokens: Sequence[Token]) -> list[Line]:
        """The blocks of a parsed document, a blank line between each two."""
        return self._blocks(SyntaxTreeNode(list(tokens)).children, self.width, 0)

    def _blocks(
        self, nodes: Sequence[SyntaxTreeNode], width: int, depth: int, *, tight: bool = False
    ) -> list[Line]:
        lines: list[Line] = []
        for node in nodes:
            drawn = self._block(node, width, depth)
            if lines and drawn and not tight:
                lines.append(BLANK)
            lines += drawn
        return lines

    def _block(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Line]:
        match node.type:
            case "paragraph":
                return paragraph(node, width)
            case "heading":
                level = min(int(node.tag[1:]), 3)
                return [
                    Line(line.text, (Span(0, len(line.text), f"h{level}"), *line.spans))
                    for line in paragraph(node, width)
                ]
            case "fence" | "code_block":
                self.next_code += 1
                return draw_code(
                    node.content.rstrip("\n"),
                    node.info.strip().split(" ")[0],
                    self.next_code - 1,
                    width,
                )
            case "bullet_list" | "ordered_list":
                return self._list(node, width, depth)
            case "blockquote":
                inside = self._blocks(node.children, width - 2, depth)
                return [prefixed(_under(line, "quote"), "▎ ", "quote-bar") for line in inside]
            case "table":
                return draw_table(_rows(node), width)
            case "hr":
                return [styled("─" * width, "rule")]
            case _:
                return wrap(Line(clean(node.content or "").strip()), width)

    def _list(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Line]:
        start = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else 0
        last = len(f"{start + len(node.children) - 1}. ")
        tight = all(
            child.hidden
            for item in node.children
            for child in item.children
            if child.type == "paragraph"
        )
        lines: list[Line] = []
        for index, item in enumerate(node.children):
            mark = (
                f"{start + index}. ".rjust(last)
                if node.type == "ordered_list"
                else f"{_BULLETS[min(depth, 2)]} "
            )
            inside = self._blocks(item.children, max(width - len(mark), 8), depth + 1, tight=tight) or [
                BLANK
            ]
            if lines and not tight:
                lines.append(BLANK)
            lines += hung(inside, mark, "bullet")
        return lines


def paragraph(node: SyntaxTreeNode, width: int) -> list[Line]:
    """Inline text, wrapped; a hard break begins a new line."""
    lines: list[Line] = []
    for line in _inline(node):
        lines += wrap(line, width)
    return lines


def _inline(node: SyntaxTreeNode) -> list[Line]:
    text: list[str] = []
    spans: list[Span] = []
    breaks: list[int] = []
    _walk(node.children[0].children if node.children else [], text, spans, breaks)
    whole = "".join(text)
    edges = [0, *breaks, len(whole)]
    return [_cut(whole, spans, a, b) for a, b in itertools.pairwise(edges)]


def _walk(
    nodes: Sequence[SyntaxTreeNode], text: list[str], spans: list[Span], breaks: list[int]
) -> None:
    for node in nodes:
        start = sum(map(len, text))
        match node.type:
            case "softbreak":
                text.append(" ")
            case "hardbreak":
                breaks.append(start)
            case "code_inline":
                text.append(clean(node.content))
                spans.append(Span(start, start + len(text[-1]), "code-inline"))
            case "image":
                text.append(f"[image: {clean(node.content) or 'no description'}]")
                spans.append(Span(start, start + len(text[-1]), "em"))
            case "link":
                at = len(spans)
                _walk(node.children, text, spans, breaks)
                href = clean(str(node.attrs.get("href", "")))
                style = f"link:{href}" if href.startswith(_LINKS) else "em"
                spans.insert(at, Span(start, sum(map(len, text)), style))
            case "em" | "strong" | "s":
                at = len(spans)
                _walk(node.children, text, spans, breaks)
                spans.insert(at, Span(start, sum(map(len, text)), _INLINE[node.type]))
            case _:
                text.append(clean(node.content or "").replace("\n", " "))


def _cut(text: str, spans: Sequence[Span], start: int, end: int) -> Line:
    return Line(
        text[start:end],
        tuple(
            Span(max(a, start) - start, min(b, end) - start, s)
            for a, b, s in spans
            if a < end and b > start
        ),
    )


def _under(line: Line, style: str) -> Line:
    return Line(line.text, (Span(0, len(line.text), style), *line.spans), line.fill)


def _rows(table: SyntaxTreeNode) -> list[list[Line]]:
    """The cells of a table, header first, each one unwrapped line."""
    return [[_cell(cell) for cell in row.children] for row in _table_rows(table)]


def _table_rows(table: SyntaxTreeNode) -> Iterator[SyntaxTreeNode]:
    for part in table.children:
        yield from part.children


def _cell(node: SyntaxTreeNode) -> Line:
    lines = _inline(node)
    return lines[0] if lines else BLANK
