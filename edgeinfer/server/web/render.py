"""Render Markdown as HTML that is safe to show: without scripts, and without loading anything.

The Markdown parser is that of the terminal chat. HTML in the Markdown is shown as text. Links may be
http, https and mailto. A picture becomes a text with the picture's description and address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from edgeinfer.chat.history.values import Turn
from edgeinfer.chat.markdown import GrowingMarkdown, parser
from edgeinfer.safe_text import without_controls

if TYPE_CHECKING:
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token

#: Maximum length (characters) of a tool call's arguments and of its result on the page.
_CALL = 8000

#: Callback that gets an unexpected exception of the renderer.
Report = Callable[[Exception], object]


@cache
def _renderer() -> RendererHTML:
    from markdown_it.renderer import RendererHTML  # this import takes 30 ms, and only the page needs it

    renderer = RendererHTML()
    rules: dict[str, Any] = {
        "fence": _code,
        "code_block": _code,
        "formula": _formula,
        "formula_block": _plain,
        "plain": _plain,
        "image": _picture,
        "link_open": _link,
        "th_open": _cell,
        "td_open": _cell,
    }
    renderer.rules.update(rules)
    return renderer


def _code(tokens: Sequence[Token], index: int, *_: Any) -> str:
    token = tokens[index]
    language = escape(token.info.strip().split(" ")[0][:40])
    return (
        f'<div class="code"><div class="code-bar"><span>{language}</span>'
        f'<button type="button" class="copy">Copy</button></div>'
        f'<pre tabindex="0"><code>{escape(token.content)}</code></pre></div>\n'
    )


def _formula(tokens: Sequence[Token], index: int, *_: Any) -> str:
    return f'<span class="plain">{escape(tokens[index].content)}</span>'


def _plain(tokens: Sequence[Token], index: int, *_: Any) -> str:
    return f'<p class="plain">{escape(tokens[index].content)}</p>'


def _picture(tokens: Sequence[Token], index: int, *_: Any) -> str:
    token = tokens[index]
    address = escape(str(token.attrs.get("src", "")))
    return f'<span class="picture">{escape(token.content)} ({address})</span>'


def _link(tokens: Sequence[Token], index: int, *_: Any) -> str:
    address = escape(str(tokens[index].attrs.get("href", "")))
    if not address:  # `[text]()`: an empty address would reload this page
        return "<a>"
    return f'<a href="{address}" target="_blank" rel="noopener noreferrer nofollow">'


def _cell(tokens: Sequence[Token], index: int, *_: Any) -> str:
    """Render a table cell with its alignment as a class, because the CSP forbids style attributes."""
    token = tokens[index]
    style = str(token.attrs.get("style", ""))
    return f'<{token.tag} class="{style.removeprefix("text-align:")}">' if style else f"<{token.tag}>"


def _fail(error: Exception) -> None:
    raise error


class GrowingHtml:
    """The HTML of a Markdown text that is being generated. Only its last blocks are rendered again.

    After an unexpected exception (passed to `report`), the text is shown without formatting.
    """

    def __init__(self, text: str = "", report: Report = _fail) -> None:
        self.blocks: list[str] = []
        self._source = ""
        self._document: GrowingMarkdown | None = GrowingMarkdown()
        self._settled = 0
        self._report = report
        self.add(text)

    def add(self, text: str) -> int:
        """Append text; return the index of the first block that changed, 0 if rendering failed."""
        self._source += text
        if self._document is not None:
            try:
                return self._render(self._document, text)
            except Exception as error:  # noqa: BLE001  this turn is shown without formatting
                self._document = None
                self._report(error)
        self.blocks = [f'<p class="plain">{escape(without_controls(self._source))}</p>']
        return 0

    def _render(self, document: GrowingMarkdown, text: str) -> int:
        first = self._settled
        settled, last = document.add(text)
        options = parser().options
        self.blocks[first:] = [_renderer().render(block, options, {}) for block in (*settled, *last)]
        self._settled += len(settled)
        return first


@lru_cache(256)
def blocks(text: str, report: Report = _fail) -> tuple[str, ...]:
    """Render Markdown as HTML blocks (paragraphs, lists, code). `report` is as in `GrowingHtml`."""
    return tuple(GrowingHtml(text, report).blocks)


def render_turn(turn: Turn, page: tuple[int, int], report: Report = _fail) -> dict[str, object]:
    """Return a turn's fields for the page: a question (`text`) or an answer (`blocks` of HTML).

    Editing a question or regenerating an answer makes alternatives of a turn: `page` is (2, 3) for the
    second of three. The field `characters` of an attached file is the length of its text, 0 for a
    picture. `report` is as in `GrowingHtml`.
    """
    is_question = turn.role == "user"
    return {
        "id": turn.id,
        "role": turn.role,
        "status": turn.status,
        "text": turn.content if is_question else "",
        "reasoning": without_controls(turn.reasoning),
        "blocks": () if is_question else blocks(turn.content, report),
        "files": [
            {"name": file.name, "is_picture": file.is_picture, "characters": len(file.text)}
            for file in turn.attachments
        ],
        "calls": [
            {
                "id": use.id,
                "name": without_controls(use.name).replace("__", " · ", 1),
                "status": use.status,
                "arguments": without_controls(use.arguments)[:_CALL],
                "result": without_controls(use.result)[:_CALL],
            }
            for use in turn.calls
        ],
        "page": page,
        "model": turn.model,
        "note": turn.error or turn.cut_off_note.partition(" · ")[0],
        "stats": turn.stats,
        "cost": turn.stats.cost,
    }
