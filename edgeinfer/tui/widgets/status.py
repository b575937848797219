"""The status line: model, start, context, speed; least important parts go first if narrow."""

from __future__ import annotations

from typing import NamedTuple

from textual.app import RenderResult
from textual.content import Content
from textual.widget import Widget


class Part(NamedTuple):
    """A piece of the line: a higher `weight` stays longer; `shortens` may lose its end."""

    text: str
    weight: int
    style: str = ""
    shortens: bool = False


#: On a narrower terminal (cells) the hint would push out the state.
_LEAST_FOR_HINT = 60

#: A part that may be shortened is left out rather than shorter than this (cells).
_SHORTEST = 14


class Status(Widget):
    """Shows parts from left to right, and a hint at the right edge."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._parts: tuple[Part, ...] = ()
        self._hint = ""

    def show(self, parts: tuple[Part, ...], hint: str = "") -> None:
        """Show these; draw only if something changed."""
        if (parts, hint) != (self._parts, self._hint):
            self._parts, self._hint = parts, hint
            self.refresh()

    def render(self) -> RenderResult:
        width = self.size.width
        hint = self._hint if width >= _LEAST_FOR_HINT else ""
        kept = [p for p in self._parts if p.text]
        while len(kept) > 1 and (over := _length(kept) + len(hint) + 2 - width) > 0:
            least = min(kept, key=lambda p: p.weight)
            at = kept.index(least)
            kept.remove(least)
            if least.shortens and len(least.text) - over >= _SHORTEST:
                kept.insert(
                    at, least._replace(text=least.text[: len(least.text) - over - 1] + "…", weight=99)
                )
        line = Content(" · ").join(
            [Content.styled(p.text, p.style) if p.style else Content(p.text) for p in kept]
        )
        gap = width - line.cell_length - len(hint)
        if hint and gap >= 2:
            line = Content.assemble(line, " " * gap, (hint, "dim"))
        return line.truncate(width, ellipsis=True)


def _length(parts: list[Part]) -> int:
    return sum(len(p.text) for p in parts) + 3 * (len(parts) - 1)
