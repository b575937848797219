"""Split one answer into reasoning, text and tool calls: `AnswerParser`.

Everything is text, or reasoning inside a span, but for what could still become a marker. A marker of
the family opens a section, which `tool_call_parser` and `xml_calls` read. A call ends the reasoning
that it stands in: models forget to close it.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Literal

from edgeinfer.runtime.chat_format.reasoning import ReasoningSpan
from edgeinfer.runtime.chat_format.tool_call_formats import (
    ToolFormat,
    Tools,
    could_become,
    first_marker,
    hold_back,
)
from edgeinfer.runtime.chat_format.tool_call_parser import FENCE, Section
from edgeinfer.runtime.chat_format.xml_calls import FUNCTION, XmlSection
from edgeinfer.runtime.events import Parsed, ReasoningDelta, TextDelta
from edgeinfer.runtime.requests import random_bytes

_ALPHABET = string.ascii_letters + string.digits
_NO_CALLS = ToolFormat(name="none")


def call_id(*, short: bool = False) -> str:
    """Make a unique call id: nine letters and digits for Mistral, else `call_` and 24."""
    drawn = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in random_bytes(24))
    return drawn[:9] if short else f"call_{drawn}"


class AnswerParser:
    """Parse one generation's text; `tools` are schemas by name. The decode loop's thread alone.

    `span`: what the answer may begin with, or has begun with if it is `opened`. `certain`: calls are
    constrained, so well formed. `special_tokens`: whether `feed` needs control tokens as text. Never
    raises on model output.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Tools,
        *,
        span: ReasoningSpan | None = None,
        opened: bool = False,
        certain: bool = False,
        special_tokens: bool = False,
    ) -> None:
        self._form = form if tools else _NO_CALLS
        self._tools, self._certain = tools, certain
        self._span = span or ReasoningSpan("", "")
        #: "closed": after a span, before the first character of the answer.
        self._phase: Literal["start", "thinking", "closed", "answer"] = "start" if span else "answer"
        if opened:
            self._phase = "thinking"
        begin = tuple(marker for marker in self._form.begin if not marker.startswith(FENCE))
        self._ends_of_reasoning = (self._span.close, *begin)
        self._steps = {
            "start": self._start,
            "thinking": self._think,
            "closed": self._skip_space,
            "answer": self._outside,
        }
        self.special_tokens = special_tokens
        self.n_broken_calls = 0
        self._events: list[Parsed] = []
        self._text = ""
        self._section: Section | XmlSection | None = None
        self._n_calls = 0
        self._space = ""
        self._fresh, self._after_call = True, False
        self._has_thought = False
        self._answer = ""

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the span."""
        return self._phase == "thinking" and self._section is None

    @property
    def is_holding(self) -> bool:
        """True if the end of the text could still become a marker of the span."""
        return self._phase in ("start", "thinking") and bool(self._text)

    def feed(self, text: str) -> Sequence[Parsed]:
        """Return the events certain after `text`, without what could still become a marker."""
        self._text += text
        return self._parse()

    def finish(self, *, cut: bool = False) -> Sequence[Parsed]:
        """Return what was held back, at the end of the generation; `cut`: the model did not end it."""
        events = list(self._parse())
        text = ""
        while (section := self._section) is not None:
            section.finish(cut=cut)
            self._take_calls(section)
            self._section = None
            marker, left = section.leftover
            self.n_broken_calls += bool(marker)
            if marker or not isinstance(section, XmlSection):
                text = marker + left  # what an unfinished call shows is no call
            else:
                self._text = left
            events += self._parse()
        text, self._text = text + self._text, ""
        if self._phase == "thinking":
            self._reason(text)
        elif self._phase != "closed":
            self._say(text)
            if not self._after_call:
                self._flush_space()
        return [*events, *self._parse()]

    def _parse(self) -> Sequence[Parsed]:
        while self._inside_section() if self._section is not None else self._steps[self._phase]():
            pass
        events, self._events = self._events, []
        return _merged(events) if len(events) > 1 else events

    # the steps: each says whether there is more to do

    def _start(self) -> bool:
        begun = self._text.lstrip()
        if begun.startswith(self._span.open):
            self._text = begun[len(self._span.open) :]
            self._phase = "thinking"
            return True
        if not begun or could_become(begun, (self._span.open, self._span.plain)):
            return False
        if self._span.plain and begun.startswith(self._span.plain):
            self._text = begun[len(self._span.plain) :]
        self._phase = "answer"
        return True

    def _think(self) -> bool:
        at, marker = first_marker(self._text, self._ends_of_reasoning)
        if at < 0:
            certain, self._text = hold_back(self._text, self._ends_of_reasoning)
            self._reason(certain)
            return False
        self._reason(self._text[:at])
        self._text = self._text[at:]
        if marker != self._span.close:
            return self._open(marker)
        self._text = self._text[len(marker) :]
        self._phase, self._space = "closed", ""
        self._fresh = True
        return True

    def _skip_space(self) -> bool:
        """White space between the span and the answer belongs to neither."""
        self._text = self._text.lstrip()
        if self._text:
            self._phase = "answer"
        return bool(self._text)

    def _outside(self) -> bool:
        form = self._form
        if form.bare and self._fresh:
            stripped = self._text.lstrip()
            if stripped[:1] in ("{", "["):
                self._space += self._text[: len(self._text) - len(stripped)]
                self._text = stripped
                return self._open("")
        at, marker = first_marker(self._text, form.begin)
        if at < 0:
            certain, self._text = hold_back(self._text, form.begin)
            self._say(certain)
            return False
        self._say(self._text[:at])
        self._text = self._text[at:]
        return self._open(marker)

    def _open(self, marker: str) -> bool:
        """Open a section at the marker, which the text begins with."""
        text = self._text[len(marker) :]
        begun = text.lstrip()[:1]
        if self._form.inner == "xml" and marker != FUNCTION and not begun:
            return False
        self._text = text
        if marker == FUNCTION and self._answer.count(FENCE) % 2:  # an example in a block of code
            self._leave(marker, "")
            return True
        self._fresh = False
        # a constraint knows the family's first marker alone
        certain = self._certain and marker in ("", *self._form.begin[:1])
        if self._form.inner == "xml" and begun not in ("{", "["):
            self._section = XmlSection(marker, self._tools, certain, self._new_call)
        else:
            self._section = Section(self._form, marker, self._tools, certain, self._new_call)
        return True

    def _inside_section(self) -> bool:
        section = self._section
        assert section is not None
        text, self._text = self._text, ""
        section.feed(text)
        self._take_calls(section)
        if not section.is_over:
            return False
        marker, text = section.leftover
        self._section = None
        self.n_broken_calls += bool(marker)
        self._leave(marker, text)
        return bool(self._text)

    def _take_calls(self, section: Section | XmlSection) -> None:
        if events := section.take_events():
            self._phase = "answer"
            self._events += events

    def _leave(self, marker: str, text: str) -> None:
        """Go on after a section; the marker of one that failed is text, or it would open again."""
        if self._phase == "thinking":
            self._reason(marker)
        else:
            self._say(marker)
        self._text = text + self._text

    # what comes of it

    def _new_call(self) -> tuple[int, str]:
        """Return (index, id) of a new call. White space before it was layout."""
        self._space = ""
        self._after_call = True
        self._n_calls += 1
        return self._n_calls - 1, call_id(short=self._form.short_ids)

    def _say(self, text: str) -> None:
        """Emit text; white space at the beginning and after a call waits for what follows."""
        if self._fresh or self._after_call:
            stripped = text.lstrip()
            self._space += text[: len(text) - len(stripped)]
            text = stripped
        if text:
            self._fresh = self._after_call = False
            self._flush_space()
            self._answer += text if self._form.inner == "xml" else ""
            self._events.append(TextDelta(text))

    def _flush_space(self) -> None:
        if self._space:
            self._events.append(TextDelta(self._space))
            self._space = ""

    def _reason(self, text: str) -> None:
        """Emit reasoning without white space around the span; inside it that waits for more text."""
        text = self._space + text
        if not self._has_thought:
            text = text.lstrip()
        begun = text.rstrip()
        self._space = text[len(begun) :]
        if begun:
            self._has_thought = True
            self._events.append(ReasoningDelta(begun))


def _merged(events: list[Parsed]) -> list[Parsed]:
    """Join neighbouring pieces of text, which may have been held apart."""
    merged: list[Parsed] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta | ReasoningDelta) and type(last) is type(event):
            merged[-1] = type(event)(last.text + event.text)
        else:
            merged.append(event)
    return merged
