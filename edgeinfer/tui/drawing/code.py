"""A code block as lines: highlighted, folded at the edge, labelled with language and number."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from edgeinfer.tui.drawing.lines import Line, Span, clean, fold, prefixed, right

#: Pygments' token names, from the outermost, to our style names. What is not listed looks like plain
#: code.
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
    """A block of `width` cells. `number` counts the answer's blocks from 1, as `/copy code N` does."""
    label = clean(language)[:20] or "text"
    head = Line(f"  {label}", (Span(2, 2 + len(label), "code-label"),), "code")
    lines = [right(head, f"copy {number} ", f"copy:{number}", width)]
    for line in highlight(clean(text), language):
        lines += [prefixed(piece, "  ", fill="code") for piece in fold(line, width - 3)]
    return lines


def highlight(text: str, language: str) -> list[Line]:
    """The code's lines with the styles of its tokens; unstyled where the language is unknown."""
    lexer = _lexer(language)
    if lexer is None:
        return [Line(line) for line in text.split("\n")]
    lines: list[Line] = []
    row, at = "", 0
    spans: list[Span] = []
    for kind, value in lexer.get_tokens(text):
        style = _style(kind)
        for index, part in enumerate(value.split("\n")):
            if index:
                lines.append(Line(row, tuple(spans)))
                row, at = "", 0
                spans = []
            if part:
                if style:
                    spans.append(Span(at, at + len(part), style))
                row += part
                at += len(part)
    if row:
        lines.append(Line(row, tuple(spans)))
    return lines


@lru_cache(maxsize=64)
def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name  # 10 ms, and then some for each language
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
