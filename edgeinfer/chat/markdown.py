"""Parse the Markdown of answers while they grow, for the web page and the terminal.

The dialect is that of comments on GitHub: line breaks are kept, and bare URLs are links. Formulas and
HTML are shown as typed. Reference links are not supported, because a definition that comes later would
change blocks that are already shown.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from edgeinfer.safe_text import without_controls

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

    Block = list[Token]

#: Schemes of clickable links; other links are shown as text, because opening them could start programs.
_LINK = re.compile(r"(https?://|mailto:)[^\s]", re.IGNORECASE)
#: Matches formulas: `\(…\)`, `\[…\]`, `$$…$$`, and `$…$`, except where `$` seems to be a currency.
_FORMULA = re.compile(
    r"\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\$\$.{1,2000}?\$\$"
    r"|\$(?![\s$])[^$\n]{0,200}(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_FORMULA_ENDS = {"\\[": "\\]", "$$": "$$"}
_TASK = re.compile(r"\[([ xX])\] ")
_BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")
_FENCE = re.compile(r"( {0,3})(`{3,}(?=[^`\n]*\n)|~{3,})([^\n]*)\n")
#: Maximum length (characters) of a block, and of a code block; a longer one is shown as plain text.
#: Each new piece causes the last block to be parsed again, which takes up to 0.2 s at this length. Code
#: takes less than 0.1 µs per character.
_MAX_BLOCK, _MAX_CODE = 16 << 10, 256 << 10


@cache
def parser() -> MarkdownIt:
    """Return the Markdown parser, which has no state and may be shared."""
    from markdown_it import MarkdownIt  # imported here: the import takes 35 ms
    from markdown_it.rules_block import fence

    parser = MarkdownIt("commonmark", {"html": False, "linkify": True, "breaks": True})
    parser.enable(["table", "strikethrough", "linkify"]).disable("reference")
    parser.validateLink = lambda url: bool(_LINK.match(url))  # type: ignore[method-assign]
    if parser.linkify is not None:
        parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
    interrupts: Any = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    # as on GitHub, a code fence whose first line contains pipes is not the header of a table
    parser.block.ruler.before("table", "fence_before_table", fence, interrupts)
    parser.block.ruler.before("fence", "formula_block", _formula_block, interrupts)
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.core.ruler.push("tasks", _tasks)
    return parser


def _formula(state: Any, silent: bool) -> bool:
    match = _FORMULA.match(state.src, state.pos)
    if match is None or match.end() > state.posMax:
        return False
    if not silent:
        state.push("formula", "", 0).content = match[0]
    state.pos = match.end()
    return True


def _formula_block(state: Any, first: int, last: int, silent: bool) -> bool:
    """Parse a formula of several lines, from `\\[` or `$$` to the closing mark or a blank line.

    Returns False, as a rule of markdown-it, if line `first` begins no formula. `silent`: only test.
    """
    begin = state.bMarks[first] + state.tShift[first]
    opening = state.src[begin : begin + 2]
    closing = _FORMULA_ENDS.get(opening)
    if closing is None or state.is_code_block(first):
        return False
    _, has_end, tail = state.src[begin + 2 : state.eMarks[first]].partition(closing)
    if has_end and tail.strip():  # text follows, so the formula is part of a paragraph
        return False
    if silent:
        return True
    line = first + 1
    while line < last and not has_end and not state.isEmpty(line):
        if state.sCount[line] < state.blkIndent:
            break
        has_end = closing in state.src[state.bMarks[line] : state.eMarks[line]]
        line += 1
    token = state.push("formula_block", "", 0)
    token.content = state.getLines(first, line, state.blkIndent, False).strip()
    token.map = [first, line]
    state.line = line
    return True


def _tasks(state: Any) -> None:
    """Replace `[ ]` and `[x]` at the beginning of list items by ☐ and ☑."""
    for before, token in zip(state.tokens, state.tokens[2:], strict=False):
        if before.type == "list_item_open" and token.type == "inline" and token.children:
            text = token.children[0]
            box = _TASK.match(text.content) if text.type == "text" else None
            if box:
                text.content = ("☐ " if box[1] == " " else "☑ ") + text.content[4:]


class GrowingMarkdown:
    """Parses Markdown that arrives in pieces, into the same blocks as the whole text at once."""

    def __init__(self) -> None:
        self._open = ""
        self._searched = 0

    def add(self, text: str) -> tuple[list[Block], list[Block]]:
        """Append text; return blocks that are now final, and blocks that later text may change."""
        self._open += without_controls(text)
        settled: list[Block] = []
        while True:
            if blank := _BLANK_LINES.match(self._open):
                self._cut(blank.end())
            fence = _FENCE.match(self._open, 0, _MAX_BLOCK)
            blocks, n_settled, n_read = self._code(fence) if fence else self._parse()
            settled += blocks[:n_settled]
            self._cut(n_read)
            if not n_read or not self._open:
                return settled, blocks[n_settled:]

    def _cut(self, length: int) -> None:
        if length:
            self._open, self._searched = self._open[length:], 0

    def _code(self, fence: re.Match[str]) -> tuple[list[Block], int, int]:
        """Parse the first code block; return it in a list, the number of final blocks, its length."""
        text = self._open
        closing = re.compile(rf"^ {{0,3}}{fence[2]}{fence[2][0]}*[ \t]*$", re.MULTILINE)
        closing_line = closing.search(text, max(fence.end(), self._searched))
        self._searched = text.rfind("\n") + 1
        if len(text) > _MAX_CODE and (closing_line is None or closing_line.end() >= _MAX_CODE):
            return [[_token("plain", text[:_MAX_CODE])]], 1, _MAX_CODE
        if fence[1]:  # only the parser removes the fence's indentation from each line
            block = parser().parse(text[: closing_line.end() if closing_line else None])
        else:
            content = text[fence.end() : closing_line.start() if closing_line else None]
            lines, newline, last = content.rpartition("\n")
            content = lines + newline + last * bool(last.strip(" \t"))  # as markdown-it does
            block = [_token("fence", content, fence[3])]
        if closing_line is None or closing_line.end() == len(text):
            return [block], 0, 0
        return [block], 1, closing_line.end() + 1

    def _parse(self) -> tuple[list[Block], int, int]:
        """Parse the text; return blocks, how many are final (all but the last), and their length."""
        text = self._open[:_MAX_BLOCK]
        tokens = parser().parse(text)
        starts = [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        blocks = [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=False)]
        n_lines = text.count("\n")  # counts only complete lines
        for index in range(len(blocks) - 1, 0, -1):
            first = blocks[index][0]
            line = first.map[0] if first.map else 0
            if line + (2 if first.type == "table_open" else 1) <= n_lines:
                return blocks, index, sum(map(len, text.split("\n")[:line])) + line
        if len(self._open) > _MAX_BLOCK:
            length = text.rfind("\n") + 1 or len(text)
            return [[_token("plain", text[:length])]], 1, length
        return blocks, 0, 0


def _token(kind: str, content: str, info: str = "") -> Token:
    from markdown_it.token import Token

    return Token(kind, "code", 0, content=content, info=info)
