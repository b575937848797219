"""Files that ride with the next question: given on the command line, by `/file`, or named with `@`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from textual.widgets import Static

from edgeinfer.chat.attachments import counted, mentioned, read
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import EdgeInferError


class Attaching:
    """Keeps them, counts their tokens, and shows them in `line`, above the composer."""

    def __init__(self, session: ChatSession, line: Static, attachments: Sequence[Attachment]) -> None:
        self._session = session
        self._line = line
        self._kept = list(attachments)
        self._named: dict[Path, Attachment] = {}

    def add(self, attachment: Attachment) -> None:
        """Keep a file for the next question."""
        self._kept.append(self._counted(attachment))
        self.show()

    def typed(self, text: str) -> None:
        """Read and count the files that the text in the composer names by now."""
        paths = mentioned(text) if "@" in text else []
        if list(self._named) != paths:
            known, self._named = self._named, {}
            for path in paths:
                with contextlib.suppress(EdgeInferError):  # said when it is sent
                    self._named[path] = known.get(path) or self._counted(read(path))
            self.show()

    @property
    def found(self) -> list[Attachment]:
        """What would ride along now, as it was read last."""
        return [*self._kept, *self._named.values()]

    def collect(self, text: str) -> list[Attachment]:
        """Return what rides along with `text`, read now. Raises UsageError."""
        named = [read(path) for path in mentioned(text)]
        return [self._counted(a) for a in (*self._kept, *named)]

    @property
    def kept(self) -> list[Attachment]:
        """What rides along without being named in the text."""
        return self._kept

    def keep(self, attachments: Sequence[Attachment]) -> None:
        """Keep these for the next question, and no others."""
        self._kept = list(attachments)
        self.show()

    def clear(self) -> None:
        """Forget them: they were sent."""
        self._kept, self._named = [], {}
        self.show()

    def show(self) -> None:
        """Show them in one line, or none where there is none."""
        self._kept = [self._counted(a) for a in self._kept]
        self._line.update("  ".join(_label(a) for a in self.found))
        self._line.display = bool(self.found)

    def _counted(self, attachment: Attachment) -> Attachment:
        return counted(attachment, self._session.engine)


def _label(attachment: Attachment) -> str:
    tokens = f" · {attachment.tokens:,} tokens" if attachment.tokens else ""
    return f"+ {attachment.name}{tokens}"
