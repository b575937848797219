"""The code blocks of an answer, for copying. One Markdown parser for everything in the chat."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


class Code(msgspec.Struct, frozen=True):
    """A fenced or indented block."""

    language: str
    text: str


@cache
def parser() -> MarkdownIt:
    """GitHub's Markdown without HTML: what models write. Safe to share, it keeps no state between
    parses.
    """
    from markdown_it import MarkdownIt  # 30 ms, and `run` needs none of it

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def code_blocks(markdown: str) -> list[Code]:
    """Every code block, in order, at any depth."""
    return [
        Code(token.info.strip().split(" ")[0], token.content.rstrip("\n"))
        for token in parser().parse(markdown)
        if token.type in ("fence", "code_block")
    ]
