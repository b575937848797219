"""The input field with its history, completions, queued messages and attachments."""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from edgeinfer.chat import attachments
from edgeinfer.chat.commands import CommandCompletion
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import EdgeInferError
from edgeinfer.tui.bindings import bindings

#: A pasted text with more lines or characters than this is attached, not inserted.
_LONG_PASTE_LINES, _LONG_PASTE = 40, 6000


class Composer(TextArea):
    """The input field. `editing`: id of the question that the text will replace; None for none."""

    BINDINGS: ClassVar[list[Binding]] = bindings("composer")  # type: ignore[assignment]

    editing: reactive[int | None] = reactive(None, init=False)

    @dataclass
    class Sent(Message):
        """Posted when the user presses Enter. `editing`: id of the question that `text` replaces."""

        text: str
        editing: int | None

    @dataclass
    class Choosing(Message):
        """Posted to select the next (`step`: 1) or previous (-1) completion, or accept one (0)."""

        step: int

    class Left(Message):
        """Posted for Ctrl-D in an empty field, to leave the chat."""

    @dataclass
    class Pasted(Message):
        """Posted for a long pasted text, which is not inserted into the field."""

        text: str

    class Removed(Message):
        """Posted for Backspace in an empty field, to remove the last attachment."""

    class TakenBack(Message):
        """Posted for Up in an empty field, to take the last queued message back."""

    def __init__(self, placeholder: str, id: str | None = None) -> None:
        super().__init__(
            "",
            id=id,
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder=placeholder,
        )
        self.completing = False
        self.can_take = False
        self.has_queue = False
        self._past: list[str] = []
        self._past_index = 0
        self._unsent = ""
        #: Text that was typed before the user began to edit a question.
        self.draft = ""

    def watch_editing(self, before: int | None, editing: int | None) -> None:
        """Show whether the text will replace an earlier question (`editing` is not None).

        When editing begins, the text typed before is copied to `draft`.
        """
        if before is None:
            self.draft = self.text
        self.set_class(editing is not None, "-editing")
        hint = "editing an earlier question · Esc leaves it"
        self.border_title = hint if editing is not None else ""

    @property
    def before_cursor(self) -> str:
        """Text up to the cursor."""
        return self.get_text_range((0, 0), self.cursor_location)

    @property
    def is_recalled(self) -> bool:
        """Return whether the field shows an earlier question, recalled by Up and not changed."""
        return self._past_index > 0 and self.text == self._past[self._past_index - 1]

    def set_past(self, questions: list[str]) -> None:
        """Set the earlier questions that Up recalls, newest first."""
        self._past, self._past_index = list(questions), 0

    def remember(self, text: str) -> None:
        if text.strip() and (not self._past or self._past[0] != text):
            self._past.insert(0, text)
        self._past_index = 0

    def fill(self, *texts: str) -> None:
        """Replace the text by `texts`, each on a separate line, and put the cursor at the end."""
        self.text = "\n".join(filter(None, texts))
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        if self.completing and not select:
            self.post_message(self.Choosing(-1))
        elif self.has_queue and not select and not self.text:
            self.post_message(self.TakenBack())
        elif not select and self._past_index < len(self._past) and self._at_edge(-1):
            if self._past_index == 0:
                self._unsent = self.text
            self._past_index += 1
            self.fill(self._past[self._past_index - 1])
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self.completing and not select:
            self.post_message(self.Choosing(1))
        elif not select and self._past_index > 0 and self._at_edge(1):
            self._past_index -= 1
            self.fill(self._past[self._past_index - 1] if self._past_index else self._unsent)
        else:
            super().action_cursor_down(select)

    def _at_edge(self, step: int) -> bool:
        cursor = self.cursor_location
        target = self.get_cursor_up_location() if step < 0 else self.get_cursor_down_location()
        edge = 0 if step < 0 else self.document.line_count - 1
        return target[0] == cursor[0] == edge

    def action_send(self) -> None:
        if self.completing and self.can_take:
            self.post_message(self.Choosing(0))
            return
        text, editing = self.text, self.editing
        if text.strip():
            self._past_index = 0
            self.post_message(self.Sent(text, editing))

    def action_newline(self) -> None:
        with contextlib.suppress(ValueError):
            self.insert("\n")

    def action_complete(self) -> None:
        if self.completing:
            self.post_message(self.Choosing(0))

    def action_delete_left(self) -> None:
        if self.text:
            super().action_delete_left()
        else:
            self.post_message(self.Removed())

    def action_delete_right(self) -> None:
        if self.text:
            super().action_delete_right()
        else:
            self.post_message(self.Left())

    def _toggle_cursor_blink_visible(self) -> None:
        """Do nothing: a blinking cursor would be drawn twice a second while an answer streams."""

    async def _on_key(self, event: events.Key) -> None:
        # the binding of Enter sends the text; TextArea would also insert a line break
        if event.key == "enter":
            event.prevent_default()
            return
        # insert a format character here: Textual drops it as not printable, but joiners (U+200C,
        # U+200D) and tags are parts of words and emoji
        if event.character and unicodedata.category(event.character[0]) == "Cf":
            event.stop()
            event.prevent_default()
            self.insert(event.character)
            return
        await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        if len(event.text) > _LONG_PASTE or event.text.count("\n") >= _LONG_PASTE_LINES:
            # without this, Textual would also call TextArea's handler, which inserts the text
            event.prevent_default()
            self.post_message(self.Pasted(event.text))
        elif mention := attachments.dropped_picture(event.text):
            event.prevent_default()
            self.insert(mention)


class Queue:
    """Messages typed during an answer, to be sent after the answer. The widget `line` shows them."""

    def __init__(self, line: Static, composer: Composer) -> None:
        self._line = line
        self._composer = composer
        self._waiting: list[str] = []

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._show()

    def next(self) -> str:
        """Remove and return the oldest message; "" if there is none."""
        text = self._waiting.pop(0) if self._waiting else ""
        self._show()
        return text

    def take_back(self) -> bool:
        """Put the newest message before the text in the input field; return False if none waits."""
        if not self._waiting:
            return False
        self._composer.fill(self._waiting.pop(), self._composer.text)
        self._show()
        return True

    def take_back_all(self) -> None:
        while self.take_back():
            pass

    def _show(self) -> None:
        lines = ["queued: " + " ".join(text.split()) for text in self._waiting]
        self._line.update("\n".join([*lines, "Esc or ↑ returns the last one"]))
        self._line.display = self._composer.has_queue = bool(lines)


class Completions(OptionList, can_focus=False):
    """The list of completions above the input field. The focus stays in the field."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self.offered: list[CommandCompletion] = []

    def offer(self, completions: Sequence[CommandCompletion]) -> None:
        """Show these completions and select the first; hide the list if there are none."""
        if list(completions) == self.offered:
            return
        self.offered = list(completions)
        self.clear_options()
        width = max((len(c.label) for c in self.offered), default=0)
        rows = (Content.assemble(c.label.ljust(width + 2), (c.summary, "dim")) for c in self.offered)
        self.add_options(map(Option, rows))
        self.display = bool(self.offered)
        if self.offered:
            self.highlighted = 0

    def step(self, by: int) -> None:
        """Select the next (1) or previous (-1) completion, wrapping around."""
        if self.offered:
            self.highlighted = ((self.highlighted or 0) + by) % len(self.offered)

    @property
    def choice(self) -> CommandCompletion | None:
        return self.offered[self.highlighted] if self.offered and self.highlighted is not None else None


#: Bytes per token of English text, to estimate tokens until a loaded model can count them.
_BYTES_PER_TOKEN = 4


class AttachmentList:
    """Attachments of the next question. The widget `line` shows their names.

    `unnamed` are those that the question's text does not mention by `@name`, e.g. pasted texts.
    """

    def __init__(self, session: ChatSession, line: Static, unnamed: Sequence[Attachment]) -> None:
        self._session = session
        self._line = line
        self.unnamed = list(unnamed)
        self._named: dict[Path, Attachment] = {}
        self._missing: list[str] = []

    def add(self, attachment: Attachment) -> None:
        self.unnamed.append(self._count_tokens(attachment))
        self.show()

    def paste(self, text: str) -> Attachment:
        """Attach a pasted text; return it with its token count (0 if no model is loaded)."""
        names = {attachment.name for attachment in self.unnamed}
        numbers = range(1, len(names) + 2)
        name = next(name for n in numbers if (name := f"{attachments.PASTED} {n}") not in names)
        self.add(Attachment(name=name, text=text))
        return self.unnamed[-1]

    def remove_last(self) -> None:
        self.unnamed = self.unnamed[:-1]
        self.show()

    def read_mentioned(self, text: str) -> None:
        """Read the files that the text mentions with `@`, count their tokens, and show them.

        Files that cannot be read are left out.
        """
        paths, missing = attachments.mentioned_paths(text), attachments.missing_files(text)
        if (list(self._named), self._missing) != (paths, missing):
            self._missing = missing
            before, self._named = self._named, {}
            for path in paths:
                with contextlib.suppress(EdgeInferError):  # the error is shown when the user sends
                    self._named[path] = before.get(path) or self._count_tokens(attachments.read(path))
            self.show()

    @property
    def current(self) -> list[Attachment]:
        """Attachments, with file contents as last read."""
        return [*self.unnamed, *self._named.values()]

    def collect(self, text: str) -> list[Attachment]:
        """Return the attachments to send with the question `text`: `unnamed` and the mentioned files.

        The files are read now, because they may have changed since the user typed their names. Raises
        UsageError if a file cannot be attached.
        """
        named = [attachments.read(path) for path in attachments.mentioned_paths(text)]
        return [self._count_tokens(a) for a in (*self.unnamed, *named)]

    def clear(self) -> None:
        self.unnamed, self._named = [], {}
        self._missing = []
        self.show()

    def show(self) -> None:
        """Show the attachments in `line`, which is hidden if there are none."""
        self.unnamed = [self._count_tokens(a) for a in self.unnamed]
        engine = self._session.engine
        n_ctx = engine.info.n_ctx if engine is not None else 0
        labels = [_label(attachment, n_ctx) for attachment in self.current]
        labels += [f"no file {name}" for name in self._missing]
        self._line.update("  ".join(labels))
        self._line.display = bool(labels)

    def _count_tokens(self, attachment: Attachment) -> Attachment:
        return attachments.count_tokens(attachment, self._session.engine)


def _label(attachment: Attachment, n_ctx: int) -> str:
    if attachment.is_picture:
        return f"+ {attachment.name} · picture"
    exact = attachment.tokens
    tokens = f"{exact:,}" if exact else f"~{len(attachment.text.encode()) // _BYTES_PER_TOKEN:,}"
    limit = f" of {n_ctx:,}" if exact > n_ctx // 2 > 0 else ""
    return f"+ {attachment.name} · {tokens}{limit} tokens"
