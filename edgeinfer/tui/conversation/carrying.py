"""What a chat on a screen consists of, so that another process shows the same.

What was said is in the store of conversations, what the model has read in that of computed blocks. This
is the rest: what is typed, what is folded, where the view stands, and our own words between the turns.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgeinfer.chat.commander import Commander
from edgeinfer.chat.history.values import Attachment, Conversation
from edgeinfer.chat.session import ChatSession
from edgeinfer.tui.conversation.attaching import Attaching
from edgeinfer.tui.conversation.view import View
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.widgets.composer import Typed


class _Shown(msgspec.Struct, frozen=True, tag=True):
    """One entry of the transcript."""


class _Turn(_Shown, frozen=True, tag="turn"):
    number: int
    folded: bool


class _Remark(_Shown, frozen=True, tag="remark"):
    text: str
    kind: Literal["remark", "error"]
    hint: str


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A chat. `modes` are the terminal's before the app."""

    conversation: Conversation
    entries: list[_Turn | _Remark]
    cursor: int | None
    scroll_y: float
    following: bool
    typed: Typed
    attachments: list[Attachment]
    deleted: int | None
    theme: str
    modes: list[Any]

    def packed(self) -> bytes:
        """As bytes, for `unpacked`."""
        return msgspec.msgpack.encode(self)


def unpacked(raw: bytes) -> Carried:
    """Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(raw, type=Carried)


class Carrying:
    """Takes the chat on a screen apart, and puts one together."""

    def __init__(self, view: View, attaching: Attaching, commander: Commander) -> None:
        self._view = view
        self._session: ChatSession = view.session
        self._attaching = attaching
        self._commander = commander

    def carried(self, theme: str, modes: list[Any]) -> Carried:
        """The chat as it is."""
        transcript = self._view.transcript
        return Carried(
            conversation=self._session.conversation,
            entries=[_taken_apart(e) for e in transcript.entries if not isinstance(e, Welcome)],
            cursor=transcript.cursor,
            scroll_y=transcript.scroll_y,
            following=transcript.following,
            typed=self._view.composer.typed,
            attachments=self._attaching.kept,
            deleted=self._commander.deleted,
            theme=theme,
            modes=modes,
        )

    def restore(self, carried: Carried) -> None:
        """Be that chat, but for the model. Raises StoreError."""
        if carried.conversation.id:
            self._session.open(carried.conversation.id)
        else:
            self._session.conversation = carried.conversation
        self._commander.deleted = carried.deleted
        self._attaching.keep(carried.attachments)
        self._view.composer.take(carried.typed)
        transcript = self._view.transcript
        entries = [entry for shown in carried.entries if (entry := self._entry(shown))]
        transcript.show(entries or [Welcome(self._view.model)])
        self._view.refresh_status()
        if not carried.following:
            transcript.scroll_to(y=carried.scroll_y, animate=False, force=True)
        if carried.cursor is not None:
            transcript.cursor = carried.cursor
            transcript.focus(scroll_visible=False)

    def _entry(self, shown: _Turn | _Remark) -> Entry | None:
        match shown:
            case _Remark(text, kind, hint):
                return Remark(text, kind, hint)
            case _Turn(number, folded):
                turn = next((turn for turn in self._session.path if turn.id == number), None)
                if turn is None:
                    return None
                entry = self._view.entry(turn)
                if isinstance(entry, AnswerEntry | Question) and entry.folded != folded:
                    entry.toggle()
                return entry


def _taken_apart(entry: Entry) -> _Turn | _Remark:
    if isinstance(entry, Remark):
        return _Remark(entry.text, entry.kind, entry.hint)
    folded = entry.folded if isinstance(entry, AnswerEntry | Question) else True
    return _Turn(entry.turn_id, folded)
