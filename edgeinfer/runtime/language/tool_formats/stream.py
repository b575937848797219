"""Tool calls out of a stream of text, whatever the family: `CallParser`.

Outside of a section everything is text, but for what could still become a marker. In a section calls
are read one object at a time. A call is handed over when it is whole, known and valid JSON; until then
it could still be text, and when it cannot be a call it is, to the last character. With `certain` (the
output is constrained, so calls are known to be well formed) a call's name and arguments are handed over
as they arrive.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.language.markers import first_marker, held_back
from edgeinfer.runtime.language.prepared import Parsed
from edgeinfer.runtime.language.tool_formats.families import ToolFormat
from edgeinfer.runtime.language.tool_formats.other_calls import Tools
from edgeinfer.runtime.language.tool_formats.section import Section
from edgeinfer.runtime.randomness import random_bytes

_ALPHABET = string.ascii_letters + string.digits


def call_id(*, short: bool = False) -> str:
    """Make a unique call id: nine letters and digits for Mistral, else `call_` and 24."""
    drawn = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in random_bytes(24))
    return drawn[:9] if short else f"call_{drawn}"


class CallParser:
    """One generation's text to text and calls; `tools` are schemas by name, `ids` makes an id."""

    def __init__(
        self,
        form: ToolFormat,
        tools: Tools,
        *,
        certain: bool = False,
        ids: Callable[[], str] | None = None,
    ) -> None:
        self._form = form
        self._tools = tools
        self._certain = certain
        self._id = ids or (lambda: call_id(short=form.short_ids))
        self._count = 0
        self._text = ""
        self._space = ""
        self._fresh = True
        self._after_call = False
        self._section: Section | None = None
        self.special_tokens = False

    def feed(self, text: str) -> Sequence[Parsed]:
        """Return the events certain after `text`, without what could still become a marker."""
        events: list[Parsed] = []
        self._text += text
        while self._step(events):
            pass
        return _merged(events)

    def finish(self) -> Sequence[Parsed]:
        """What was held back, at the end of the generation."""
        events: list[Parsed] = []
        if self._section is not None:
            self._section.finish()
            events += self._section.take_events()
            self._close(self._section, events)
        text, self._text = self._text, ""
        self._say(text, events)
        if not self._after_call:
            self._flush_space(events)
        return _merged(events)

    def _step(self, events: list[Parsed]) -> bool:
        if self._section is None:
            return self._outside(events)
        text, self._text = self._text, ""
        self._section.feed(text)
        events += self._section.take_events()
        if not self._section.is_over:
            return False
        self._close(self._section, events)
        return bool(self._text)

    def _close(self, section: Section, events: list[Parsed]) -> None:
        """Go on outside; the marker of a section that failed is text, or it would open again."""
        marker, rest = section.leftover
        self._section = None
        self._say(marker, events)
        self._text = rest + self._text

    def _outside(self, events: list[Parsed]) -> bool:
        if self._form.bare and self._fresh and self._opens_bare():
            return True
        at, marker = first_marker(self._text, self._form.begin)
        if at < 0:
            keep = held_back(self._text, self._form.begin)
            certain, self._text = (
                self._text[: len(self._text) - keep],
                self._text[len(self._text) - keep :],
            )
            self._say(certain, events)
            return False
        self._say(self._text[:at], events)
        self._text = self._text[at + len(marker) :]
        self._open(marker)
        return True

    def _opens_bare(self) -> bool:
        """An answer that begins with a bracket may be a call without a marker."""
        stripped = self._text.lstrip()
        if not stripped or stripped[0] not in "{[":
            return False
        self._space += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        self._open("")
        return True

    def _open(self, marker: str) -> None:
        self._fresh = False
        self._section = Section(self._form, marker, self._tools, self._certain, self._call)

    def _call(self) -> tuple[int, str]:
        """(index, id) of a new call. White space that led to it was only layout."""
        self._space = ""
        self._after_call = True
        self._count += 1
        return self._count - 1, self._id()

    def _say(self, text: str, events: list[Parsed]) -> None:
        """Emit text; white space at the beginning and after a call waits for what follows."""
        if self._fresh or self._after_call:
            stripped = text.lstrip()
            self._space += text[: len(text) - len(stripped)]
            text = stripped
        if text:
            self._fresh = self._after_call = False
            self._flush_space(events)
            events.append(TextDelta(text))

    def _flush_space(self, events: list[Parsed]) -> None:
        if self._space:
            events.append(TextDelta(self._space))
            self._space = ""


def _merged(events: list[Parsed]) -> list[Parsed]:
    merged: list[Parsed] = []
    for event in events:
        if merged and isinstance(event, TextDelta) and isinstance(merged[-1], TextDelta):
            merged[-1] = TextDelta(merged[-1].text + event.text)
        else:
            merged.append(event)
    return merged
