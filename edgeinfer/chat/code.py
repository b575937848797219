"""Code blocks: found in an answer, made around a file. One Markdown parser for all of the chat."""

from __future__ import annotations

import re
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
    """Return a stateless parser of GitHub's Markdown without HTML, safe to share."""
    from markdown_it import MarkdownIt  # 30 ms, and `run` needs none of it

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def code_blocks(markdown: str) -> list[Code]:
    """Return every code block, in order, at any depth."""
    return [
        Code(token.info.strip().split(" ")[0], token.content.rstrip("\n"))
        for token in parser().parse(markdown)
        if token.type in ("fence", "code_block")
    ]


def fenced(text: str, info: str = "") -> str:
    """Return `text` between code fences longer than any in it; `info` names its language."""
    fence = "`" * max(3, 1 + max((len(m) for m in re.findall(r"`{3,}", text)), default=0))
    return f"{fence}{info}\n{text.rstrip()}\n{fence}"
