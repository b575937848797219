"""Split one answer into reasoning, text and tool calls while it is generated: `AnswerParser`.

The parser looks for the markers of the model's format, such as `<think>` and `<tool_call>`. It holds
back the end of the text while more characters could complete a marker (`<tool_` waits for `call>`). The
text after a tool-call marker is a section, which `tool_call_parser` or `xml_calls` parses. A tool call
also ends the reasoning, because models forget to close it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from edgeinfer.runtime.chat_format.reasoning import ReasoningSpan
from edgeinfer.runtime.chat_format.tool_call_formats import (
    ToolFormat,
    Tools,
    could_become,
    split_at_marker,
)
from edgeinfer.runtime.chat_format.tool_call_parser import FENCE, JsonSection, Section
from edgeinfer.runtime.chat_format.xml_calls import FUNCTION, XmlSection
from edgeinfer.runtime.events import Parsed, ReasoningDelta, TextDelta

_NO_CALLS = ToolFormat(name="none")


class AnswerParser:
    """Parses the text of one answer into events, on the decode thread. Never raises.

    - tools: the JSON schema of each tool's arguments, by the tool's name.
    - span: the markers of the reasoning with which the answer may begin; None if it has none.
    - opened: the prompt ends with the opening marker, so the answer begins inside the reasoning.
    - constrained: a grammar guarantees well-formed calls, so their arguments are streamed.
    - special_tokens: the text for `feed` must contain control tokens, because some are markers.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Tools,
        *,
        span: ReasoningSpan | None = None,
        opened: bool = False,
        constrained: bool = False,
        special_tokens: bool = False,
    ) -> None:
        self._form = form if tools else _NO_CALLS
        self._tools, self._constrained = tools, constrained
        self._span = span or ReasoningSpan("", "")
        #: Where the parsed text ends: before any marker or text ("start"), inside the reasoning
        #: ("thinking"), between the reasoning and the answer ("closed"), or inside the answer.
        self._phase: Literal["start", "thinking", "closed", "answer"] = "start" if span else "answer"
        if opened:
            self._phase = "thinking"
        begin = (marker for marker in self._form.begin if not marker.startswith(FENCE))
        self._ends_of_reasoning = (self._span.close, *begin)
        self.special_tokens = special_tokens
        self.n_broken_calls = 0
        self._events: list[Parsed] = []
        self._text = ""
        self._section: Section | None = None
        self._n_calls = 0
        #: White space held back until text follows; dropped if the reasoning ends or a call begins.
        self._space = ""
        self._fresh, self._has_thought = True, False
        self._after_call = False
        self._answer = ""

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends inside the reasoning."""
        return self._phase == "thinking" and self._section is None

    @property
    def is_holding(self) -> bool:
        """Return whether text is held back that could become a marker of the reasoning span."""
        return self._phase in ("start", "thinking") and bool(self._text)

    def feed(self, text: str) -> Sequence[Parsed]:
        """Add text; return the events of all text that cannot be the start of a marker."""
        self._text += text
        while self._step():
            pass
        events, self._events = self._events, []
        return _merge(events) if len(events) > 1 else events

    def finish(self, *, cut: bool = False) -> Sequence[Parsed]:
        """Return the last events. `cut`: a limit ended the answer, perhaps inside a tool call."""
        events = list(self.feed(""))
        text = ""
        while (section := self._section) is not None:
            section.finish(cut=cut)
            marker, leftover = self._close_section(section)
            if marker:
                text = marker + leftover  # the call is incomplete: show it as text
            else:
                self._text = leftover
            events += self.feed("")
        text, self._text = text + self._text, ""
        if self._phase != "closed":
            self._emit(text)
        if self._phase in ("start", "answer") and not self._after_call:
            self._flush_space()
        return [*events, *self.feed("")]

    def _step(self) -> bool:
        """Parse a piece of `_text`; return False if the rest must wait for more text."""
        if self._section is not None:
            return self._parse_section(self._section)
        if self._phase == "start":
            return self._start()
        if self._phase == "closed":  # the answer begins after white space
            self._text = self._text.lstrip()
            self._phase = "answer" if self._text else "closed"
            return bool(self._text)
        return self._find_marker()

    def _start(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._span.open):
            self._text = text[len(self._span.open) :]
            self._phase = "thinking"
            return True
        if not text or could_become(text, (self._span.open, self._span.plain)):
            return False
        if self._span.plain and text.startswith(self._span.plain):
            self._text = text[len(self._span.plain) :]
        self._phase = "answer"
        return True

    def _find_marker(self) -> bool:
        """Emit the text before the next marker; end the reasoning or begin a tool call there.

        Returns False if the rest must wait for more text.
        """
        markers = self._form.begin
        if self._phase == "thinking":
            markers = self._ends_of_reasoning
        elif self._form.bare and self._fresh and self._text.lstrip()[:1] in ("{", "["):
            self._space += self._text[: len(self._text) - len(self._text.lstrip())]
            self._text = self._text.lstrip()
            return self._open_section("")
        text, marker, self._text = split_at_marker(self._text, markers)
        self._emit(text)
        if marker and self._phase == "thinking" and marker == self._span.close:
            self._phase, self._space = "closed", ""
            self._fresh = True
            return True
        return bool(marker) and self._open_section(marker)

    def _open_section(self, marker: str) -> bool:
        """Begin a tool-call section after `marker`; return False if its notation is not known yet."""
        is_xml = self._form.inner == "xml"
        first = self._text.lstrip()[:1]
        if is_xml and marker != FUNCTION and not first:
            self._text = marker + self._text
            return False
        if marker == FUNCTION and self._answer.count(FENCE) % 2:  # an example call in a code block
            self._emit(marker)
            return True
        self._fresh = False
        # the grammar enforces well-formed calls only after the first of the format's markers
        constrained = self._constrained and marker in ("", *self._form.begin[:1])
        kind = XmlSection if is_xml and first not in ("{", "[") else JsonSection
        self._section = kind(
            self._form, marker, self._tools, constrained=constrained, n_calls=self._n_calls
        )
        return True

    def _parse_section(self, section: Section) -> bool:
        text, self._text = self._text, ""
        section.feed(text)
        if section.is_over:
            marker, self._text = self._close_section(section)
            self._emit(marker)  # as text: parsing the marker again would open the section again
        else:
            self._take_calls(section)
        return section.is_over and bool(self._text)

    def _close_section(self, section: Section) -> tuple[str, str]:
        self._take_calls(section)
        self._section = None
        marker, leftover = section.leftover
        self.n_broken_calls += bool(marker)
        return marker, leftover

    def _take_calls(self, section: Section) -> None:
        if events := section.take_events():
            self._phase, self._after_call = "answer", True
            self._space = ""  # not shown before a call
            self._n_calls = section.n_calls
            self._events += events

    def _emit(self, text: str) -> None:
        """Emit a part of the reasoning or answer; drop white space at the start and end of each."""
        if self._phase == "thinking":
            text = self._space + text
            if not self._has_thought:
                text = text.lstrip()
            self._space = text[len(text.rstrip()) :]
            if text := text.rstrip():
                self._has_thought = True
                self._events.append(ReasoningDelta(text))
            return
        if self._fresh or self._after_call:
            self._space += text[: len(text) - len(text.lstrip())]
            text = text.lstrip()
        if text:
            self._fresh = self._after_call = False
            self._flush_space()
            self._answer += text if self._form.inner == "xml" else ""
            self._events.append(TextDelta(text))

    def _flush_space(self) -> None:
        if self._space:
            self._events.append(TextDelta(self._space))
            self._space = ""


def _merge(events: list[Parsed]) -> list[Parsed]:
    """Join successive events of the same kind of text."""
    merged: list[Parsed] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta | ReasoningDelta) and type(last) is type(event):
            merged[-1] = type(event)(last.text + event.text)
        else:
            merged.append(event)
    return merged
