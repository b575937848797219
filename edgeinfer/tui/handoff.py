"""Hands the chat on a screen over to another process: from the cold one to the resumed one.

Turns are in the store of conversations, KV blocks in the prefix cache; the rest is transferred: what is
typed and folded, the scroll position, and remarks between the turns.

The two have a socket of their own. The source sends the chat, its size before it; the target sends
`READY` once it shows the same on no screen, with its model loaded; the source stops reading keys and
sends `TAKE`, unless a key was pressed since: then it withdraws. From `TAKE` on it waits for the
launcher's message to leave. If that socket ends instead, the source has the terminal again, and keys
pressed meanwhile still wait there to be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from edgeinfer.chat.commander import Commander
from edgeinfer.chat.history.values import Attachment, Conversation
from edgeinfer.chat.session import ChatSession
from edgeinfer.host import Handoff
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.view import View
from edgeinfer.tui.widgets.composer import AttachmentList, ComposerState

READY, TAKE = b"r", b"t"
_HEAD_BYTES = 8


class SharedTerminal(Protocol):
    """A driver of a terminal that two processes share; `heard` counts the bytes read from it."""

    heard: int

    @property
    def modes(self) -> list[Any]: ...

    def release(self) -> None: ...

    def claim(self, modes: list[Any]) -> None: ...


class ChatHandoffSource:
    """Hands the chat over once a target is on offer and the chat was idle for `rest_s`.

    `at_rest` returns True if it is idle, `serialize` serializes the chat, `leave` ends this process.
    """

    def __init__(
        self,
        handoff: Handoff,
        terminal: SharedTerminal,
        rest_s: float,
        at_rest: Callable[[], bool],
        serialize: Callable[[], bytes],
        leave: Callable[[], object],
    ) -> None:
        self._handoff = handoff
        self._terminal = terminal
        self._rest_s = rest_s
        self._at_rest = at_rest
        self._serialize = serialize
        self._leave = leave
        self._offered = False
        self._heard = -1
        self._since = 0.0
        self._task: asyncio.Task[None] | None = None
        self.is_over = False
        self._fd = handoff.listen()
        asyncio.get_running_loop().add_reader(self._fd, self._receive)

    def close(self) -> None:
        """Stop offering the chat. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._task is not None:
            self._task.cancel()

    def _receive(self) -> None:
        word = self._handoff.receive()
        if word == "start":
            self._offered = True
            return
        self.close()
        if word == "commit":
            self.is_over = True
            self._leave()

    def look(self) -> None:
        """Start the handoff when it is time; called some times a second."""
        if self._task is not None and not self._task.done():
            return
        now = time.monotonic()
        if self._terminal.heard != self._heard or not self._at_rest():
            self._heard = self._terminal.heard
            self._since = now
        elif self._offered and now - self._since >= self._rest_s:
            self._since = now
            self._task = asyncio.get_running_loop().create_task(self._give())

    async def _give(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                self._handoff.idle(theirs)
            try:
                await self._speak(ours)
            except ConnectionError:
                self._offered = False

    async def _speak(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        chat = self._serialize()
        await loop.sock_sendall(channel, len(chat).to_bytes(_HEAD_BYTES, "little") + chat)
        self._offered = await loop.sock_recv(channel, 1) == READY
        if not self._offered or self._has_woken():
            return
        self._terminal.release()
        if not self._has_woken():
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(channel, TAKE)
                await loop.sock_recv(channel, 1)  # until it has died: nothing is sent
            self._offered = False
        self._terminal.claim(self._terminal.modes)

    def _has_woken(self) -> bool:
        return self._terminal.heard != self._heard or not self._at_rest()


class ChatHandoffTarget:
    """Receives the chat of the process that started cold. `chat` is serialized, b"" if that ended."""

    def __init__(self, handoff: Handoff, channel: socket.socket) -> None:
        self.has_terminal = False
        self._handoff = handoff
        self._channel = channel
        self.chat = self._received()

    def _received(self) -> bytes:
        with self._channel.makefile("rb") as source:
            size = int.from_bytes(source.read(_HEAD_BYTES), "little")
            chat = source.read(size)
        return chat if len(chat) == size else b""

    async def take(self, terminal: SharedTerminal, modes: list[Any]) -> bool:
        """Report that this process is ready. Return True if it has the terminal now."""
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(self._channel, READY)
            self.has_terminal = await loop.sock_recv(self._channel, 1) == TAKE
        if self.has_terminal:
            terminal.claim(modes)
            self._handoff.ready()  # the channel stays open: its end would say that this one died
        return self.has_terminal


class _EntryState(msgspec.Struct, frozen=True, tag=True):
    """One entry of the transcript."""


class _TurnState(_EntryState, frozen=True, tag="turn"):
    number: int
    folded: bool


class _RemarkState(_EntryState, frozen=True, tag="remark"):
    text: str
    kind: Literal["remark", "error"]
    hint: str


class ChatState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a chat. `modes` are the terminal's before the app."""

    conversation: Conversation
    entries: list[_TurnState | _RemarkState]
    cursor: int | None
    scroll_y: float
    following: bool
    typed: ComposerState
    attachments: list[Attachment]
    deleted: int | None
    theme: str
    modes: list[Any]

    def pack(self) -> bytes:
        """Serialize for `unpack_state`."""
        return msgspec.msgpack.encode(self)


def unpack_state(raw: bytes) -> ChatState:
    """Deserialize. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(raw, type=ChatState)


class StateTransfer:
    """Reads and restores the state of the chat on a screen."""

    def __init__(self, view: View, attachments: AttachmentList, commander: Commander) -> None:
        self._view = view
        self._session: ChatSession = view.session
        self._attachments = attachments
        self._commander = commander

    def read(self, theme: str, modes: list[Any]) -> ChatState:
        """Return the state of the chat."""
        transcript = self._view.transcript
        return ChatState(
            conversation=self._session.conversation,
            entries=[_state_of(e) for e in transcript.entries if not isinstance(e, Welcome)],
            cursor=transcript.cursor,
            scroll_y=transcript.scroll_y,
            following=transcript.following,
            typed=self._view.composer.typed,
            attachments=self._attachments.kept,
            deleted=self._commander.deleted,
            theme=theme,
            modes=modes,
        )

    def restore(self, state: ChatState) -> None:
        """Restore a state, except the model. Raises StoreError."""
        if state.conversation.id:
            self._session.open(state.conversation.id)
        else:
            self._session.conversation = state.conversation
        self._commander.deleted = state.deleted
        self._attachments.keep(state.attachments)
        self._view.composer.take(state.typed)
        transcript = self._view.transcript
        entries = [entry for entry_state in state.entries if (entry := self._entry(entry_state))]
        transcript.show(entries or [Welcome(self._view.model)])
        self._view.refresh_status()
        if not state.following:
            transcript.scroll_to(y=state.scroll_y, animate=False, force=True)
        if state.cursor is not None:
            transcript.cursor = state.cursor
            transcript.focus(scroll_visible=False)

    def _entry(self, entry_state: _TurnState | _RemarkState) -> Entry | None:
        match entry_state:
            case _RemarkState(text, kind, hint):
                return Remark(text, kind, hint)
            case _TurnState(number, folded):
                turn = next((turn for turn in self._session.path if turn.id == number), None)
                if turn is None:
                    return None
                entry = self._view.entry(turn)
                if isinstance(entry, AnswerEntry | Question) and entry.folded != folded:
                    entry.toggle()
                return entry


def _state_of(entry: Entry) -> _TurnState | _RemarkState:
    if isinstance(entry, Remark):
        return _RemarkState(entry.text, entry.kind, entry.hint)
    folded = entry.folded if isinstance(entry, AnswerEntry | Question) else True
    return _TurnState(entry.turn_id, folded)
