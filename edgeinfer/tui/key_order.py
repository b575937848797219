"""Keys take effect in the order in which they are typed, also if many arrive at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App
from textual.events import Event

#: Number of rounds that KeyOrder waits after each key. In a round, the focused widget, the screen and
#: the app handle the messages in their queues. Four rounds handle the key, the message of its action
#: (`Sent`), the message of a change that follows (`Changed`), and the result of a dialog that the key
#: closes.
_ROUNDS = 4


class KeyOrder:
    """Passes keys and pastes to `dispatch` one by one, each after the previous one has had its effect.

    Textual inserts a printable key in the focused widget, but runs a key binding later, in the app.
    Without this class, characters that are typed after Enter or a cursor key could be inserted before
    the text is sent or the cursor has moved.
    """

    def __init__(self, app: App[Any], dispatch: Callable[[Event], Awaitable[None]]) -> None:
        self._app = app
        self._dispatch = dispatch
        self._waiting: deque[Event] = deque()
        self.is_idle = True

    async def add(self, event: Event) -> None:
        """Dispatch a key or paste, after earlier ones that still wait."""
        self._waiting.append(event)
        if self.is_idle:
            await self._dispatch_next()

    async def _dispatch_next(self) -> None:
        self.is_idle = not self._waiting
        if self._waiting:
            await self._dispatch(self._waiting.popleft())
            await self._wait(3 * _ROUNDS)

    async def _wait(self, n_queues: int) -> None:
        """Dispatch the next key once `n_queues` more queues have handled their present messages."""
        if not n_queues:
            await self._dispatch_next()
            return
        screen = self._app.screen
        queue = (self._app, screen, screen.focused or screen)[(n_queues - 1) % 3]
        if queue.call_later(self._wait, n_queues - 1):
            return
        if queue is self._app:  # the app is closing: the waiting keys can have no effect
            self._waiting.clear()
        await self._wait(n_queues - 1)
