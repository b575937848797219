"""Markdown of models and users as HTML that a page can show: no script, no picture from elsewhere.

The server renders, with the parser of the terminal chat. HTML in the Markdown is text, links are http,
https and mailto, and a picture is its description with its address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from edgeinfer.chat.history.values import Attachment, Stats, Turn
from edgeinfer.safe_text import without_controls
from edgeinfer.server.wire_types import Reply

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_LINK = re.compile(r"(https?://|mailto:)[^\s]", re.IGNORECASE)
#: A longer block or line (characters) is shown as it is: the parser takes up to 40 µs a character,
#: and parses the last block again with each piece. A code block costs 0.1 µs.
_LONGEST, _LONGEST_LINE = 16 << 10, 4 << 10
_LONGEST_CODE = 256 << 10
_PIECE = 8 << 10
#: A tool call's arguments and its result are cut to this (characters).
_CALL = 8000


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt  # 30 ms, on the first page

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: bool(_LINK.match(url))  # type: ignore[method-assign]
    for name, rule in (
        ("fence", _code),
        ("code_block", _code),
        ("image", _picture),
        ("link_open", _link),
    ):
        parser.add_render_rule(name, rule)
    return parser


def _code(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    token = tokens[index]
    language = escape(token.info.strip().split(" ")[0][:40])
    return (
        f'<div class="code"><div class="code-bar"><span>{language}</span>'
        f'<button type="button" class="copy">Copy</button></div>'
        f'<pre tabindex="0"><code>{escape(token.content)}</code></pre></div>\n'
    )


def _picture(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    token = tokens[index]
    address = escape(str(token.attrs.get("src", "")))
    return f'<span class="picture">{escape(token.content)} ({address})</span>'


def _link(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    address = escape(str(tokens[index].attrs.get("href", "")))
    return f'<a href="{address}" target="_blank" rel="noopener noreferrer nofollow">'


class Growing:
    """A Markdown text that grows; all but its last block are rendered once."""

    def __init__(self, text: str = "") -> None:
        self.blocks: list[str] = []
        self._open = ""
        self._settled = 0
        for at in range(0, len(text), _PIECE):
            self.add(text[at : at + _PIECE])

    def add(self, text: str) -> int:
        """Append text; return the index of the first block that changed."""
        first = self._settled
        self._open += without_controls(text)
        del self.blocks[first:]
        if self._is_too_long():
            self.blocks.append(f'<p class="plain">{escape(self._open)}</p>')
            self._open, self._settled = "", len(self.blocks)
            return first
        parser = _parser()
        tokens = parser.parse(self._open)
        starts = [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            self.blocks.append(parser.renderer.render(tokens[start:end], parser.options, {}))
        lines = tokens[starts[-1]].map if starts else None
        if len(starts) > 1 and lines:
            self._open = "\n".join(self._open.split("\n")[lines[0] :])
            self._settled = len(self.blocks) - 1
        return first

    def _is_too_long(self) -> bool:
        if self._open.lstrip().startswith(("```", "~~~")):
            return len(self._open) > _LONGEST_CODE
        longest = max(map(len, self._open.split("\n")))
        return len(self._open) > _LONGEST or longest > _LONGEST_LINE


@lru_cache(256)
def blocks(text: str) -> tuple[str, ...]:
    """Render a whole text as a block each of HTML."""
    return tuple(Growing(text).blocks)


class ShownFile(Reply, frozen=True, kw_only=True):
    """An attachment, named."""

    name: str
    is_picture: bool
    characters: int


class ShownCall(Reply, frozen=True, kw_only=True):
    """A call of a tool; `result` is what the model was told."""

    id: str
    name: str
    status: str
    arguments: str
    result: str


class ShownTurn(Reply, frozen=True, kw_only=True):
    """A turn as the page shows it. `text` is a question's own text; `page` its place among its
    alternatives, from 1, and their number.
    """

    id: int
    role: str
    status: str
    text: str
    reasoning: str
    blocks: tuple[str, ...]
    files: list[ShownFile]
    calls: list[ShownCall]
    page: tuple[int, int]
    model: str
    note: str
    stats: Stats
    cost: str


def shown(turn: Turn, page: tuple[int, int]) -> ShownTurn:
    """Return a turn as the page shows it."""
    is_question = turn.role == "user"
    return ShownTurn(
        id=turn.id,
        role=turn.role,
        status=turn.status,
        text=turn.content if is_question else "",
        reasoning=without_controls(turn.reasoning),
        blocks=blocks(turn.content),
        files=[_file(attachment) for attachment in turn.attachments],
        calls=[
            ShownCall(
                id=use.id,
                name=without_controls(use.name).replace("__", " · ", 1),
                status=use.status,
                arguments=without_controls(use.arguments)[:_CALL],
                result=without_controls(use.result)[:_CALL],
            )
            for use in turn.calls
        ],
        page=page,
        model=turn.model,
        note=turn.error or turn.cut.partition(" · ")[0],
        stats=turn.stats,
        cost=turn.stats.cost,
    )


def _file(attachment: Attachment) -> ShownFile:
    return ShownFile(
        name=attachment.name, is_picture=attachment.is_picture, characters=len(attachment.text)
    )
