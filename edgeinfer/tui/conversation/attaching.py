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

#: Of English text; shown only until a model counts.
_BYTES_PER_TOKEN = 4


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

    def paste(self, text: str) -> Attachment:
        """Keep a pasted text for the next question. Return it, with its tokens once a model counts."""
        names = {attachment.name for attachment in self._kept}
        numbers = range(1, len(names) + 2)
        name = next(name for n in numbers if (name := f"pasted text {n}") not in names)
        self.add(Attachment(name=name, text=text))
        return self._kept[-1]

    def remove_last(self) -> None:
        """Remove what was attached last, if anything was."""
        self.keep(self._kept[:-1])

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
        engine = self._session.engine
        n_ctx = engine.info.n_ctx if engine is not None else 0
        self._line.update("  ".join(_label(a, n_ctx) for a in self.found))
        self._line.display = bool(self.found)

    def _counted(self, attachment: Attachment) -> Attachment:
        return counted(attachment, self._session.engine)


def _label(attachment: Attachment, n_ctx: int) -> str:
    exact = attachment.tokens
    tokens = f"{exact:,}" if exact else f"~{len(attachment.text.encode()) // _BYTES_PER_TOKEN:,}"
    limit = f" of {n_ctx:,}" if exact > n_ctx // 2 > 0 else ""
    return f"+ {attachment.name} · {tokens}{limit} tokens"
