"""The widget that shows a conversation; only visible lines are drawn (decision 060)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from edgeinfer.tui.drawing.entry import Entry, TurnEntry
from edgeinfer.tui.drawing.lines import Line

#: Maximum width of text (cells), because wider text is hard to read.
MAX_WIDTH = 100

_NAMES = """
    question prompt attachment page fold dim error error-bar hint remark remark-bar rule cursor h1
    h2 h3 em strong strike link bullet quote quote-bar table-header table-line copy code code-inline
    code-label code-comment code-keyword code-builtin code-function code-string code-number
    code-deleted
""".split()


class Transcript(ScrollView, can_focus=True):
    """A scrolling list of entries. `cursor` is the index of the selected entry, None for none.

    `following`: the end of the list is in view, so the list scrolls on when text is added.
    """

    FOCUS_ON_CLICK = False  # a click to select text must leave the focus in the input field

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"transcript--{name}" for name in _NAMES}

    @dataclass
    class Clicked(Message):
        """Posted when a label in an entry is clicked.

        `mark` names the label: "copy:N" copies code block N, "fold" folds the entry, and "page" is the
        number of the alternative, such as `2/3`, and shows the next alternative.
        """

        entry: Entry
        mark: str

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self.cursor: int | None = None
        self.following = True
        self._bottoms: list[int] = []
        self._styles: dict[str, Style] = {}
        self._strips: dict[tuple[Line, bool], Strip] = {}

    @property
    def allow_select(self) -> bool:
        return True

    @property
    def text_width(self) -> int:
        """Maximum width (cells) of a line of text in the present window."""
        return max(20, min(self.scrollable_content_region.width - 3, MAX_WIDTH))

    def show(self, entries: list[Entry]) -> None:
        """Replace the entries, and scroll to the end."""
        self.entries = entries
        self.cursor = None
        self.following = True
        self._relayout()

    def add(self, entry: Entry) -> None:
        """Add an entry; scroll to it if the end was in view."""
        self.entries.append(entry)
        self._relayout()

    def update_entry(self, entry: Entry) -> None:
        """Draw a changed entry again; fast for the last one, which grows while an answer streams."""
        if self.entries and entry is self.entries[-1]:
            self._grow_last()
        elif entry in self.entries:
            self._relayout()

    def _grow_last(self) -> None:
        width = self.text_width
        height = len(self.entries[-1].lines(width))
        before = self._bottoms[-2] if len(self._bottoms) > 1 else 0
        self._bottoms[-1] = before + height
        self._resize_virtual()
        self.refresh()

    def _relayout(self) -> None:
        width = self.text_width
        self._bottoms = list(accumulate(e.height(width) for e in self.entries))
        self._resize_virtual()
        self._draw_in_view()
        self.refresh()

    def _resize_virtual(self) -> None:
        height = self._bottoms[-1] if self._bottoms else 0
        self.virtual_size = Size(self.scrollable_content_region.width, height)
        if self.following:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)

    def _draw_in_view(self) -> None:
        width, height = self.text_width, max(self.size.height, 1)
        if not self._bottoms or not self.is_attached:
            return
        # drawing an entry replaces its estimated height, which may bring further entries into view.
        # Usually two rounds suffice
        for _ in range(8):
            top = max(0, round(self.scroll_y) - height)
            first = bisect_right(self._bottoms, top)
            last = bisect_right(self._bottoms, round(self.scroll_y) + 2 * height)
            near = range(first, min(last + 1, len(self.entries)))
            pending = [i for i in near if not self.entries[i].is_drawn(width)]
            if not pending:
                return
            shift = 0
            for i in pending:
                old = self.entries[i].height(width)
                new = len(self.entries[i].lines(width))
                if self._bottoms[i] <= self.scroll_y:
                    shift += new - old
            self._bottoms = list(accumulate(e.height(width) for e in self.entries))
            self._resize_virtual()
            if shift and not self.following:
                self.scroll_to(y=self.scroll_y + shift, animate=False, force=True)

    def on_resize(self) -> None:
        self._strips.clear()
        self._relayout()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value and new_value < self.max_scroll_y:
            self.following = False
        elif new_value >= self.max_scroll_y:
            self.following = True
        self._draw_in_view()

    def move_cursor(self, step: int) -> bool:
        """Select the turn before (-1) or after (1) the selected one; return False if there is none."""
        turns = [i for i, e in enumerate(self.entries) if e.turn_id]
        cursor = len(self.entries) if self.cursor is None else self.cursor
        ahead = [i for i in turns if (i - cursor) * step > 0]
        if not ahead:
            return False
        self.select(ahead[-1] if step < 0 else ahead[0])
        return True

    @property
    def selection(self) -> Entry | None:
        index = self.cursor
        return self.entries[index] if index is not None and index < len(self.entries) else None

    def select(self, index: int | None) -> None:
        """Select the entry at `index` (None: no entry), and scroll it into view."""
        self.cursor = index
        if index is not None:
            top = self._bottoms[index - 1] if index else 0
            bottom = self._bottoms[index]
            height = self.scrollable_content_region.height
            if top < self.scroll_y or bottom > self.scroll_y + height:
                y = top if bottom - top >= height else max(0, bottom - height)
                self.scroll_to(y=y, animate=False, force=True)
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()
        self._strips.clear()

    def render_line(self, y: int) -> Strip:
        row = round(self.scroll_y) + y
        width = self.scrollable_content_region.width
        index = bisect_right(self._bottoms, row)
        if index >= len(self.entries):
            return Strip.blank(width, self.rich_style)
        entry = self.entries[index]
        lines = entry.lines(self.text_width)
        local = row - (self._bottoms[index - 1] if index else 0)
        if local >= len(lines):
            return Strip.blank(width, self.rich_style)
        # the line's position is not in the cache key, because equal lines look the same anywhere
        key = (lines[local], index == self.cursor)
        strip = self._strips.get(key)
        if strip is None:
            if len(self._strips) > 4000:
                self._strips.clear()
            strip = self._strips[key] = self._strip(*key, width)
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(row)) is not None:
            strip = self._mark_selected(strip, span, len(lines[local].text) + 1)
        return strip.apply_offsets(0, row)

    def _strip(self, line: Line, chosen: bool, width: int) -> Strip:
        base = self.rich_style
        margin = Segment("▎", base + self._style("cursor")) if chosen else Segment(" ", base)
        segments = [margin, *self._segments(line, base)]
        strip = Strip(segments)
        fill = base + self._style(line.fill) if line.fill else base
        strip = strip.extend_cell_length(min(self.text_width + 1, width), fill) if line.fill else strip
        return strip.adjust_cell_length(width, base)

    def _mark_selected(self, strip: Strip, span: tuple[int, int], length: int) -> Strip:
        start, stop = span[0], length if span[1] == -1 else span[1]
        style = self.screen.get_component_rich_style("screen--selection")
        parts = strip.divide([max(0, start), max(start, stop), strip.cell_length])
        return Strip.join([p.apply_style(style) if i == 1 else p for i, p in enumerate(parts)])

    def _segments(self, line: Line, base: Style) -> list[Segment]:
        text, spans, fill = line
        if fill:
            base = base + self._style(fill)
        if not spans:
            return [Segment(text, base)]
        edges = sorted({0, len(text), *(e for s in spans for e in (s.start, s.stop) if e <= len(text))})
        segments = []
        for start, stop in pairwise(edges):
            style = base
            for span in spans:
                if span.start <= start and span.stop >= stop:
                    style = style + self._style(span.style)
            segments.append(Segment(text[start:stop], style))
        return segments

    def _style(self, name: str) -> Style:
        style = self._styles.get(name)
        if style is None:
            kind, _, target = name.partition(":")
            style = self._blend(f"transcript--{kind}")
            if kind == "link":
                style = style + Style(link=target)
            elif kind in ("copy", "fold", "page"):
                style = style + Style.from_meta({"mark": name})
            self._styles[name] = style
        return style

    def _blend(self, name: str) -> Style:
        """Return a component's style with translucent colours blended, which Rich cannot do."""
        partial = self.get_component_rich_style(name, partial=True)
        color = self.get_component_rich_style(name).color if partial.color else None
        return partial + Style(color=color) if color else partial

    def on_click(self, event: events.Click) -> None:
        mark = event.style.meta.get("mark")
        if not mark:
            return
        index = bisect_right(self._bottoms, round(self.scroll_y) + event.y)
        if index < len(self.entries):
            self.post_message(self.Clicked(self.entries[index], mark))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        width = self.text_width
        text = "\n".join(f" {line.text}" for e in self.entries for line in e.lines(width))
        return selection.extract(text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def toggle_fold(self, entry: Entry | None) -> bool:
        """Fold or unfold a long question, or an answer's reasoning; return False for other entries."""
        if isinstance(entry, TurnEntry):
            entry.toggle()
            self._relayout()
            return True
        return False
