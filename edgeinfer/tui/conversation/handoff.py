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
from edgeinfer.tui.conversation.view import View
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.widgets.composer import Attaching, Typed

READY, TAKE = b"r", b"t"
_HEAD_BYTES = 8


class Terminal(Protocol):
    """A driver of a terminal that two processes share; `heard` counts the bytes read from it."""

    heard: int

    @property
    def modes(self) -> list[Any]: ...

    def release(self) -> None: ...

    def claim(self, modes: list[Any]) -> None: ...


class ChatHandoffSource:
    """Hands the chat over once a target is on offer and the chat was idle for `rest_s`.

    `at_rest` returns True if it is idle, `carry` serializes the chat, `leave` ends this process.
    """

    def __init__(
        self,
        handoff: Handoff,
        terminal: Terminal,
        rest_s: float,
        at_rest: Callable[[], bool],
        carry: Callable[[], bytes],
        leave: Callable[[], object],
    ) -> None:
        self._handoff = handoff
        self._terminal = terminal
        self._rest_s = rest_s
        self._at_rest = at_rest
        self._carry = carry
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
        chat = self._carry()
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

    async def take(self, terminal: Terminal, modes: list[Any]) -> bool:
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
    """The state of a chat. `modes` are the terminal's before the app."""

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
        """Serialize for `unpacked`."""
        return msgspec.msgpack.encode(self)


def unpacked(raw: bytes) -> Carried:
    """Deserialize. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(raw, type=Carried)


class StateTransfer:
    """Reads the state of the chat on a screen, and restores one."""

    def __init__(self, view: View, attaching: Attaching, commander: Commander) -> None:
        self._view = view
        self._session: ChatSession = view.session
        self._attaching = attaching
        self._commander = commander

    def carried(self, theme: str, modes: list[Any]) -> Carried:
        """Return the state of the chat."""
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
        """Restore a state, except the model. Raises StoreError."""
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
