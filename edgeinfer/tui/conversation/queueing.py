"""Messages sent while an answer is written: they wait above the composer until it has ended."""

from __future__ import annotations

from textual.widgets import Static

from edgeinfer.tui.widgets.composer import Composer


class Queue:
    """Shows the messages that wait in `line`; taking one back puts it into the composer."""

    def __init__(self, line: Static, composer: Composer) -> None:
        self._line = line
        self._composer = composer
        self._waiting: list[str] = []

    def add(self, text: str) -> None:
        """Queue a message behind the others."""
        self._waiting.append(text)
        self._show()

    def next(self) -> str:
        """Remove and return the first message, "" if none waits."""
        text = self._waiting.pop(0) if self._waiting else ""
        self._show()
        return text

    def take_back(self) -> bool:
        """Put the last message before what is typed; return False if none waits."""
        if not self._waiting:
            return False
        typed = [self._waiting.pop(), self._composer.text]
        self._composer.fill("\n".join(text for text in typed if text))
        self._show()
        return True

    def take_back_all(self) -> None:
        """Put every message before what is typed."""
        while self.take_back():
            pass

    def _show(self) -> None:
        lines = ["queued: " + " ".join(text.split()) for text in self._waiting]
        self._line.update("\n".join([*lines, "Esc or ↑ takes the last one back"]))
        self._line.display = self._composer.has_queue = bool(lines)
