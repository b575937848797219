"""Tell when an answer repeats itself: a small model can fall into a loop that only a limit ends."""

from __future__ import annotations

import re

#: A loop has this many characters at least, and contains the repeated part this often.
_SPAN, _TIMES = 240, 4
_LONGEST_PART = 400
#: Characters at the end whose last occurrence before gives the length of the part.
_KEY = 32
#: Counters of list items may differ between repeats.
_COUNTER = re.compile(r"^\s*\d+[.)]", re.MULTILINE)


class RepetitionWatch:
    """Watch one answer as it is generated."""

    def __init__(self) -> None:
        self._tail = ""

    def add(self, text: str) -> int | None:
        """Add what was generated; return how much of it (characters) makes the answer a loop, or None.

        Each character is looked at, since drafts and the time decide how the answer is cut into pieces.
        """
        for i, character in enumerate(text, 1):
            self._tail = (self._tail + character)[-_TIMES * _LONGEST_PART :]
            if self._is_loop():
                return i
        return None

    def _is_loop(self) -> bool:
        text = _COUNTER.sub("", self._tail)
        before = text.rfind(text[-_KEY:], 0, -1)
        length = len(text) - _KEY - before
        span = max(_SPAN, _TIMES * length)
        return before >= 0 and span <= len(text) and text[-span:-length] == text[length - span :]
