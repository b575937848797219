"""Draw Markdown as lines of a given width, with highlighted code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len

from edgeinfer.chat.markdown import GrowingMarkdown
from edgeinfer.tui.drawing.lines import BLANK, Line, Span, clean, hanging_indent, style_line

#: Style by Pygments token name; other tokens look like plain code.
_STYLES = {
    "Comment": "code-comment",
    "Keyword": "code-keyword",
    "Operator.Word": "code-keyword",
    "Name.Builtin": "code-builtin",
    "Name.Function": "code-function",
    "Name.Class": "code-function",
    "Name.Decorator": "code-builtin",
    "Name.Tag": "code-keyword",
    "Name.Attribute": "code-function",
    "Literal.String": "code-string",
    "Literal.Number": "code-number",
    "Generic.Deleted": "code-deleted",
    "Generic.Inserted": "code-string",
    "Generic.Heading": "code-function",
}


def draw_code(text: str, language: str, number: int, width: int) -> list[Line]:
    """Draw a code block. `number` is its number in the answer, from 1, for `/copy code N`."""
    label = clean(language)[:20] or "text"
    head = Line(f"  {label}", (Span(2, 2 + len(label), "code-label"),), "code")
    lines = [head.label_right(f"copy {number} ", f"copy:{number}", width)]
    for line in highlight(clean(text), language):
        lines += [piece.prefix("  ", fill="code") for piece in line.fold(width - 3)]
    return lines


def highlight(text: str, language: str) -> list[Line]:
    """Style code by its tokens; code in an unknown language stays plain."""
    lexer = _lexer(language)
    if lexer is None:
        return [Line(line) for line in text.split("\n")]
    lines: list[Line] = []
    row, length = "", 0
    spans: list[Span] = []
    for kind, value in lexer.get_tokens(text):
        style = _style(kind)
        for index, piece in enumerate(value.split("\n")):
            if index:
                lines.append(Line(row, tuple(spans)))
                row, length = "", 0
                spans = []
            if piece:
                if style:
                    spans.append(Span(length, length + len(piece), style))
                row += piece
                length += len(piece)
    if row:
        lines.append(Line(row, tuple(spans)))
    return lines


@lru_cache(maxsize=64)
def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name  # imported here: the import takes 10 ms
    from pygments.util import ClassNotFound

    if not language:
        return None
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=True)
    except ClassNotFound:
        return None


@lru_cache(maxsize=512)
def _style(kind: Any) -> str:
    name = str(kind).removeprefix("Token").removeprefix(".")
    while name:
        if name in _STYLES:
            return _STYLES[name]
        name = name.rpartition(".")[0]
    return ""


_INLINE = {"em": "em", "strong": "strong", "s": "strike"}
_BULLETS = ("•", "◦", "▪")


class BlockRenderer:
    """Draws Markdown blocks as lines of up to `width` cells.

    Code blocks are numbered from `first_code`, for `/copy code N`.
    """

    def __init__(self, width: int, first_code: int = 1) -> None:
        self.width = max(width, 10)
        self.next_code = first_code

    def draw(self, tokens: Sequence[Token]) -> list[Line]:
        """Draw the blocks of parsed `tokens`, with blank lines between them."""
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
                return [line.with_base_style(f"h{level}") for line in paragraph(node, width)]
            case "fence" | "code_block":
                self.next_code += 1
                language = node.info.strip().split(" ")[0]
                return draw_code(node.content.rstrip("\n"), language, self.next_code - 1, width)
            case "bullet_list" | "ordered_list":
                return self._list(node, width, depth)
            case "blockquote":
                inside = self._blocks(node.children, width - 2, depth)
                return [line.with_base_style("quote").prefix("▎ ", "quote-bar") for line in inside]
            case "table":
                return draw_table(node, width)
            case "hr":
                return [style_line("─" * width, "rule")]
            case _:
                rows = clean(node.content or "").split("\n")
                return [piece for row in rows for piece in Line(row).wrap(width)]

    def _list(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Line]:
        start = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else 0
        last = len(f"{start + len(node.children) - 1}. ")
        children = (child for item in node.children for child in item.children)
        tight = all(child.hidden for child in children if child.type == "paragraph")
        lines: list[Line] = []
        for index, item in enumerate(node.children):
            mark = f"{_BULLETS[min(depth, 2)]} "
            if node.type == "ordered_list":
                mark = f"{start + index}. ".rjust(last)
            inside = self._blocks(item.children, max(width - len(mark), 8), depth + 1, tight=tight)
            if lines and not tight:
                lines.append(BLANK)
            lines += hanging_indent(inside or [BLANK], mark, "bullet")
        return lines


def paragraph(node: SyntaxTreeNode, width: int) -> list[Line]:
    """Draw inline text, wrapped; a line break in the text begins a new line."""
    lines: list[Line] = []
    for line in _inline(node):
        lines += line.wrap(width)
    return lines


def _inline(node: SyntaxTreeNode) -> list[Line]:
    text: list[str] = []
    spans: list[Span] = []
    breaks: list[int] = []
    _walk(node.children[0].children if node.children else [], text, spans, breaks)
    whole = Line("".join(text), tuple(spans))
    edges = [0, *breaks, len(whole.text)]
    return [whole.cut(a, b) for a, b in itertools.pairwise(edges)]


def _walk(
    nodes: Sequence[SyntaxTreeNode], text: list[str], spans: list[Span], breaks: list[int]
) -> None:
    for node in nodes:
        start = sum(map(len, text))
        match node.type:
            case "softbreak" | "hardbreak":
                breaks.append(start)
            case "formula":
                for line in clean(node.content).split("\n"):
                    text += [line]
                    breaks.append(sum(map(len, text)))
                breaks.pop()
            case "code_inline":
                text.append(clean(node.content))
                spans.append(Span(start, start + len(text[-1]), "code-inline"))
            case "image":
                text.append(f"[image: {clean(node.content) or 'no description'}]")
                spans.append(Span(start, start + len(text[-1]), "em"))
            case "link" | "em" | "strong" | "s":
                n_before = len(spans)
                _walk(node.children, text, spans, breaks)
                link = f"link:{clean(str(node.attrs.get('href', '')))}"
                spans.insert(n_before, Span(start, sum(map(len, text)), _INLINE.get(node.type, link)))
            case _:
                text.append(clean(node.content or "").replace("\n", " "))


_GAP = " │ "
#: Style of a table cell → share of the cell's padding that goes before the text; 0 for other styles.
_SHIFTS = {"text-align:right": 1.0, "text-align:center": 0.5}


def draw_table(node: SyntaxTreeNode, width: int) -> list[Line]:
    """Draw a table. If it is too wide, its widest columns are narrowed, to at least 4 cells."""
    rows = [row.children for section in node.children for row in section.children]
    shifts = [_SHIFTS.get(str(cell.attrs.get("style", "")), 0.0) for cell in rows[0]]
    texts = [[_inline(cell)[0] for cell in row] for row in rows]
    widths = _column_widths(texts, width)
    lines = _row(texts[0], widths, shifts, "table-header")
    lines.append(style_line("─┼─".join("─" * w for w in widths), "table-line"))
    for row in texts[1:]:
        lines += _row(row, widths, shifts, "")
    return lines


def _column_widths(rows: Sequence[Sequence[Line]], width: int) -> list[int]:
    columns = list(itertools.zip_longest(*rows, fillvalue=BLANK))[: len(rows[0])]
    widths = [max(1, *(cell_len(cell.text) for cell in column)) for column in columns]
    room = width - len(_GAP) * (len(columns) - 1)
    while sum(widths) > room and max(widths) > 4:
        excess, widest = sum(widths) - room, max(widths)
        second = max((w for w in widths if w < widest), default=4)
        share = widths.count(widest)
        cut = max(1, min(widest - max(second, 4), -(-excess // share)))
        widths = [w - cut if w == widest else w for w in widths]
    return widths


def _row(
    cells: Sequence[Line], widths: Sequence[int], shifts: Sequence[float], style: str
) -> list[Line]:
    wrapped = [cells[i].wrap(w) if i < len(cells) else [Line()] for i, w in enumerate(widths)]
    height = max(map(len, wrapped))
    lines = []
    for y in range(height):
        text, spans = "", []
        for index, (column, w) in enumerate(zip(wrapped, widths, strict=True)):
            if index:
                spans.append(Span(len(text), len(text) + len(_GAP), "table-line"))
                text += _GAP
            cell = column[y] if y < len(column) else Line()
            cell = cell.prefix(" " * int(shifts[index] * (w - cell_len(cell.text))))
            start = len(text)
            if style:
                spans.append(Span(start, start + len(cell.text), style))
            spans += [Span(a + start, b + start, s) for a, b, s in cell.spans]
            text += cell.text + " " * (w - cell_len(cell.text))
        lines.append(Line(text.rstrip(), tuple(s for s in spans if s.start < len(text.rstrip()))))
    return lines


class RenderedMarkdown:
    """A Markdown text that grows, and its drawn lines.

    `append` draws a block again only if the new text can change that block.
    """

    def __init__(self, source: str, width: int) -> None:
        self.source = source
        self.redraw(width)

    def append(self, text: str) -> None:
        self.source += text
        self._draw(text)

    def redraw(self, width: int) -> None:
        """Draw everything again for this width."""
        self.width = width
        self.lines: list[Line] = []
        self._document = GrowingMarkdown()
        self._settled_lines = 0
        self._settled_codes = 0
        self._draw(self.source)

    def _draw(self, text: str) -> None:
        settled, last = self._document.add(text)
        del self.lines[self._settled_lines :]
        renderer = BlockRenderer(self.width, self._settled_codes + 1)
        for block in settled:
            self._add(renderer.draw(block))
        self._settled_lines = len(self.lines)
        self._settled_codes = renderer.next_code - 1
        for block in last:
            self._add(renderer.draw(block))

    def _add(self, lines: list[Line]) -> None:
        if self.lines and lines:
            self.lines.append(BLANK)
        self.lines += lines
