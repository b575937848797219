"""Files that will ride with the next question: given on the command line, by `/file`, or named with `@`
in the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from textual.widgets import Static

from edgeinfer.chat.attachments import mentioned, read
from edgeinfer.chat.values import Attachment
from edgeinfer.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.tui.screens.chat import ChatScreen


class Attaching:
    """Keeps them, counts their tokens, and shows them in one line above the composer."""

    def __init__(self, screen: ChatScreen, attachments: Sequence[Attachment]) -> None:
        self._screen = screen
        self._kept = list(attachments)
        self._named: dict[Path, Attachment] = {}

    def add(self, attachment: Attachment) -> None:
        """Ride with the next question."""
        self._kept.append(self._counted(attachment))
        self.show()

    def typed(self, text: str) -> None:
        """The text has changed: read and count the files it names by now."""
        paths = mentioned(text) if "@" in text else []
        if list(self._named) != paths:
            known, self._named = self._named, {}
            for path in paths:
                with contextlib.suppress(EdgeInferError):  # said when it is sent
                    self._named[path] = known.get(path) or self._counted(read(path))
            self.show()

    def collect(self, text: str) -> list[Attachment]:
        """What rides along with `text`, read now. Raises UsageError."""
        return [self._counted(a) for a in self._kept] + [
            self._counted(read(path)) for path in mentioned(text)
        ]

    def clear(self) -> None:
        """They were sent."""
        self._kept, self._named = [], {}
        self.show()

    def show(self) -> None:
        """One line, or none."""
        self._kept = [self._counted(a) for a in self._kept]
        line = self._screen.query_one("#attachments", Static)
        found = [*self._kept, *self._named.values()]
        line.update(
            "  ".join(f"+ {a.name}" + (f" · {a.tokens:,} tokens" if a.tokens else "") for a in found)
        )
        line.display = bool(found)

    def _counted(self, attachment: Attachment) -> Attachment:
        engine = self._screen.session.engine
        if attachment.tokens or engine is None:
            return attachment
        return msgspec.structs.replace(attachment, tokens=len(engine.tokenize(attachment.text)))
