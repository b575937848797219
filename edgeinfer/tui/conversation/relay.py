"""The chat goes on in another process: the one that started cold gives, the resumed one takes.

The two speak over a socket of their own. First comes the chat as bytes, their number before them; the
one that takes says `READY` once it shows the same on no screen, with its model there; the one that
gives stops reading keys and says `TAKE`, unless something was typed since: then it withdraws. From
`TAKE` on it waits for the launcher's word to leave. Where that socket ends instead, the terminal is
its again, and what was typed meanwhile still waits there to be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from edgeinfer.host import HandOver

READY, TAKE = b"r", b"t"
_HEAD_BYTES = 8


class Terminal(Protocol):
    """What a driver does with a terminal that two processes share; `heard` counts what came from it."""

    heard: int

    @property
    def modes(self) -> list[Any]: ...

    def release(self) -> None: ...

    def claim(self, modes: list[Any]) -> None: ...


class Giving:
    """Gives the chat away once a successor is on offer and nothing has happened for `rest_s`.

    `at_rest` says whether nothing goes on, `carry` makes bytes of the chat, `leave` ends this process.
    """

    def __init__(
        self,
        hand_over: HandOver,
        terminal: Terminal,
        rest_s: float,
        at_rest: Callable[[], bool],
        carry: Callable[[], bytes],
        leave: Callable[[], object],
    ) -> None:
        self._hand_over = hand_over
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
        self._fd = hand_over.listen()
        asyncio.get_running_loop().add_reader(self._fd, self._receive)

    def close(self) -> None:
        """Give nothing any more. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._task is not None:
            self._task.cancel()

    def _receive(self) -> None:
        word = self._hand_over.receive()
        if word == "offer":
            self._offered = True
            return
        self.close()
        if word == "leave":
            self.is_over = True
            self._leave()

    def look(self) -> None:
        """Begin when it is time; called some times a second."""
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
                self._hand_over.idle(theirs)
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


class Taking:
    """Takes the chat over from the process that started cold. `chat` are its bytes, b"" if it went."""

    def __init__(self, hand_over: HandOver, channel: socket.socket) -> None:
        self.has_terminal = False
        self._hand_over = hand_over
        self._channel = channel
        self.chat = self._received()

    def _received(self) -> bytes:
        with self._channel.makefile("rb") as source:
            size = int.from_bytes(source.read(_HEAD_BYTES), "little")
            chat = source.read(size)
        return chat if len(chat) == size else b""

    async def take(self, terminal: Terminal, modes: list[Any]) -> bool:
        """Say that this process could go on. Return whether the terminal is its now."""
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(self._channel, READY)
            self.has_terminal = await loop.sock_recv(self._channel, 1) == TAKE
        if self.has_terminal:
            terminal.claim(modes)
            self._hand_over.ready()  # the channel stays open: its end would say that this one died
        return self.has_terminal
