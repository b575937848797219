"""Entries of the transcript: a question, an answer, or a remark of the app.

An entry is drawn when it is first visible; until then its height is estimated.
"""

from __future__ import annotations

from typing import Literal

from edgeinfer.chat.history.values import Turn
from edgeinfer.tools.tool_use import ToolUse
from edgeinfer.tui.drawing.lines import BLANK, Line, Span, clean, style_line
from edgeinfer.tui.drawing.markdown import RenderedMarkdown

#: Number of lines that a folded long question shows.
_FOLD_LINES = 16


class Entry:
    """Base class of the transcript's entries; keeps the lines that were drawn for one width.

    `turn_id` is the id of the shown turn, 0 for a text of the app.
    """

    turn_id = 0

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._width = 0

    def lines(self, width: int) -> list[Line]:
        """Return the drawn lines, ending with a blank one. The caller must not change the list."""
        if width != self._width:
            self._width = width
            self._lines = [*self._draw(width), BLANK]
        return self._lines

    def height(self, width: int) -> int:
        """Return the number of lines; an estimate until the entry is drawn at this width."""
        return len(self._lines) if width == self._width else self._estimate(width)

    def is_drawn(self, width: int) -> bool:
        return width == self._width

    def invalidate(self) -> None:
        """Discard the drawn lines: they are drawn again when next shown."""
        self._width = 0

    def _draw(self, width: int) -> list[Line]:
        raise NotImplementedError

    def _estimate(self, width: int) -> int:
        raise NotImplementedError


def _rows(text: str, width: int) -> int:
    return sum(1 + len(line) // max(width, 1) for line in text.split("\n"))


class TurnEntry(Entry):
    """An entry that shows a turn. `alternative`: the second of three alternatives is (2, 3)."""

    def __init__(self, turn: Turn, alternative: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.turn = turn
        self.turn_id = turn.id
        self.alternative = alternative
        self.folded = True

    @property
    def _alternative_label(self) -> str:
        return f"‹ {self.alternative[0]}/{self.alternative[1]} ›"

    def toggle(self) -> None:
        self.folded = not self.folded
        self.invalidate()


class Question(TurnEntry):
    """A question as typed, with the names of the attachments; a long question is folded."""

    def _draw(self, width: int) -> list[Line]:
        rows: list[Line] = []
        for text in clean(self.turn.content.strip("\n")).split("\n") if self.turn.content else ():
            rows += Line(text).wrap(width - 2)
        if self.folded and len(rows) > _FOLD_LINES + 4:
            label = f"… {len(rows) - _FOLD_LINES} more lines"
            rows = [*rows[:_FOLD_LINES], style_line(label, "fold")]
        for attached in self.turn.attachments:
            tokens = f" · {attached.tokens:,} tokens" if attached.tokens else ""
            rows += style_line(f"+ {clean(attached.name)}{tokens}", "attachment").fold(width - 2)
        drawn = [
            row.with_base_style("question").prefix("  " if i else "❯ ", "prompt")
            for i, row in enumerate(rows)
        ]
        if self.alternative[1] > 1 and drawn:
            drawn[0] = drawn[0].label_right(self._alternative_label, "page", width)
        cut = [] if self.turn.cut_summary is None else _cut_mark(self.turn.cut_summary, width)
        return cut + drawn

    def _estimate(self, width: int) -> int:
        n_rows = min(_rows(self.turn.content, width - 2), _FOLD_LINES + 4)
        return n_rows + len(self.turn.attachments) + 1


def _cut_mark(summary: str, width: int) -> list[Line]:
    label = " summarised above " if summary else " no longer sent above "
    side = "─" * max(2, (width - len(label)) // 2)
    return [style_line(f"{side}{label}{side}"[:width], "rule"), BLANK]


class AnswerEntry(TurnEntry):
    """An answer. `grow` appends text while the answer streams; `finish` shows the stored turn."""

    def __init__(
        self, turn: Turn, alternative: tuple[int, int] = (1, 1), *, streaming: bool = False
    ) -> None:
        super().__init__(turn, alternative)
        self.streaming = streaming
        self.waiting = ""
        self._body: RenderedMarkdown | None = None
        self._thought: RenderedMarkdown | None = None

    def grow(self, text: str, reasoning: str) -> None:
        if self._body is None or self._thought is None:
            self._body = RenderedMarkdown(self.turn.content, max(self._width, 20) - 2)
            self._thought = RenderedMarkdown(self.turn.reasoning, max(self._width, 20) - 4)
        if text:
            self._body.append(text)
        if reasoning:
            self._thought.append(reasoning)
        self.invalidate()

    def finish(self, turn: Turn, alternative: tuple[int, int]) -> None:
        """Show the stored `turn`. `alternative`: the second of three alternatives is (2, 3)."""
        self.turn = turn
        self.alternative = alternative
        self.streaming = False
        self.waiting = ""
        self._body = self._thought = None
        self.invalidate()

    def wait(self, text: str) -> None:
        """Show `text`, e.g. the progress of the prefill, until the first token arrives."""
        if text != self.waiting:
            self.waiting = text
            self.invalidate()

    @property
    def can_unfold(self) -> bool:
        """Return whether there is reasoning, or a tool call, to unfold."""
        return bool(self.turn.reasoning or self.turn.calls or (self._thought and self._thought.source))

    def _draw(self, width: int) -> list[Line]:
        body, thought = self._bodies(width)
        lines: list[Line] = []
        if thought.source:
            lines += self._reasoning(thought, bool(body.source))
        lines += [line.prefix("  ") for line in body.lines]
        if self.turn.calls:
            lines += [BLANK] if body.source else []
            lines += [line for use in self.turn.calls for line in self._call(use, width)]
        if self.streaming and not body.source and not thought.source:
            lines.append(style_line(f"  {self.waiting or '…'}", "dim"))
        if not self.streaming:
            lines += self._foot(width, bool(lines))
        return lines

    def _bodies(self, width: int) -> tuple[RenderedMarkdown, RenderedMarkdown]:
        if self._body is None or self._thought is None:
            self._body = RenderedMarkdown(self.turn.content, width - 2)
            self._thought = RenderedMarkdown(self.turn.reasoning, width - 4)
        if self._body.width != width - 2:
            self._body.redraw(width - 2)
            self._thought.redraw(width - 4)
        return self._body, self._thought

    def _reasoning(self, thought: RenderedMarkdown, answered: bool) -> list[Line]:
        n_words = len(thought.source.split())
        verb = "Thinking" if self.streaming and not answered else "Thought"
        head = style_line(f"  {'▸' if self.folded else '▾'} {verb} · {n_words:,} words", "fold")
        if self.folded:
            return [head, BLANK]
        dimmed = (Line(text, (*spans, Span(0, len(text), "dim"))) for text, spans, _ in thought.lines)
        return [head, *(line.prefix("  │ ", "dim") for line in dimmed), BLANK]

    def _call(self, use: ToolUse, width: int) -> list[Line]:
        marks = {"pending": "…", "done": "✓", "stopped": "◌"}
        arguments = " ".join(clean(use.arguments).split())
        fold_mark = "▸" if self.folded else "▾"
        head = f"  {fold_mark} {marks.get(use.status, '✗')} {call_name(use)} {arguments}"
        lines = style_line(head, "fold").fold(width)[: 1 if self.folded else None]
        if use.status in ("failed", "refused") or not self.folded:
            style = "dim" if use.status == "done" else "error"
            for row in clean(use.result).split("\n")[: _FOLD_LINES if self.folded else None]:
                folded = style_line(row, style).fold(width - 4)
                lines += [line.prefix("  │ ", "dim") for line in folded]
        return lines

    def _foot(self, width: int, has_text: bool) -> list[Line]:
        lines: list[Line] = []
        if self.turn.status == "failed":
            lines += style_line(f"✗ {clean(self.turn.error)}", "error").wrap(width - 2)
        elif self.turn.cut_off_note:
            lines += style_line(f"◌ {self.turn.cut_off_note}", "dim").wrap(width - 2)
        lines = [line.prefix("  ") for line in lines]
        if self.alternative[1] > 1:
            lines.append(style_line(f"  {self._alternative_label}", "page"))
        if not has_text and not lines:
            lines.append(style_line("  (empty answer)", "dim"))
        return [BLANK, *lines] if has_text and lines else lines

    def _estimate(self, width: int) -> int:
        n_others = len(self.turn.calls) + 2 * bool(self.turn.reasoning)
        return _rows(self.turn.content, width - 2) + n_others + 1


def call_name(use: ToolUse) -> str:
    """Return the server and the tool of a call: `files · read`."""
    return clean(use.name).replace("__", " · ", 1)


class Remark(Entry):
    """The app's own text among the turns: help, statistics, an error and its hint."""

    def __init__(self, text: str, kind: Literal["remark", "error"] = "remark", hint: str = "") -> None:
        super().__init__()
        self.text = text
        self.kind = kind
        self.hint = hint

    def _draw(self, width: int) -> list[Line]:
        rows: list[Line] = []
        for text in clean(self.text).split("\n") if self.text else ():
            rows += style_line(text, self.kind).wrap(width - 4)
        for text in clean(self.hint).split("\n") if self.hint else ():
            rows += style_line(text, "hint").wrap(width - 4)
        bar = "error-bar" if self.kind == "error" else "remark-bar"
        return [line.prefix("  ▏ ", bar) for line in rows]

    def _estimate(self, width: int) -> int:
        return _rows(self.text, width - 4) + bool(self.hint) + 1


_FIRST_KEYS = {"Enter": "asks", "Ctrl+J": "a new line", "/": "commands", "@": "files", "F1": "help"}


class Welcome(Entry):
    """The entry of an empty conversation; shows the model and the most important keys."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def _draw(self, width: int) -> list[Line]:
        model = style_line(clean(self.model), "dim").wrap(width - 2)
        rows = [BLANK, Line("  edgeinfer", (Span(2, 11, "h2"),))]
        rows += [*(line.prefix("  ") for line in model), BLANK]
        for keys, text in _FIRST_KEYS.items():
            line = style_line(text, "dim").prefix(f"  {keys:<8}")
            rows.append(Line(line.text, (Span(2, 2 + len(keys), "bullet"), *line.spans)))
        return rows

    def _estimate(self, width: int) -> int:
        return 10
