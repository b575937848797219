"""From token bytes to text that may be shown: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edgeinfer.runtime.language.markers import held_back


class TextStream:
    """One generation's text. Feed bytes as tokens come; what could still become a stop string is held
    back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, data: bytes) -> str:
        """Text that is certain after `data`. Once `stopped_by` is set, the text before the stop string
        and nothing more.
        """
        if self.stopped_by is not None:
            return ""
        text = self._decoder.decode(data)
        return self._release(self._held + text) if self._stops else text

    def finish(self) -> str:
        """What was held back, at the end. Bytes of an unfinished character are dropped."""
        held, self._held = self._held, ""
        return "" if self.stopped_by is not None else held

    @property
    def is_holding(self) -> bool:
        """Whether text waits for what comes next: a possible stop string, or the rest of a
        character.
        """
        return bool(self._held) or bool(self._decoder.getstate()[0])

    def _release(self, text: str) -> str:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, self.stopped_by = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:place]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
