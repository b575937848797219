"""The answer journal: answers that outlive their connection and can be read again, also in part.

A task of its own generates a journaled answer. A reader gets what is there and waits for the rest;
without a reader the answer is abandoned after `unread_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.runtime.events import FinishReason
from edgeinfer.server.connection import disconnected, unless
from edgeinfer.server.limits import Limits
from edgeinfer.server.problems import shutting_down

#: Changes a body before a reader gets it, e.g. drops the events that it has.
BodyFilter = Callable[[bytes], bytes]
_COMPLETE = frozenset(get_args(FinishReason)) - {"cancelled"} | {""}


class JournaledAnswer:
    """One answer as its ASGI messages. Not thread-safe: use it on the event loop."""

    def __init__(self, limit_bytes: int, outcome: Callable[[], str]) -> None:
        #: A dialect's data beside the answer.
        self.attachment: object = None
        #: How long (s) generation continues without a reader; 0 ends it with its reader.
        self.unread_s = 0.0
        self.size_bytes = 0
        self.is_done = False
        self.is_too_long = False
        self.ended_at = 0.0
        self._limit_bytes = limit_bytes
        self._outcome = outcome
        self._messages: list[Message] = []
        self._error: BaseException | None = None
        self._readers: dict[object, int] = {}
        #: Set, and replaced, with every change.
        self._changed = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        #: Called when the answer has ended, complete or not.
        self.done_callbacks: list[Callable[[JournaledAnswer], None]] = []

    # --- writing

    def start(self, app: ASGIApp, scope: Scope) -> None:
        """Run `app` in a separate task; the request's body has been read."""
        # no `connection`: tokens must not be written past the event loop to one reader's socket
        inner = {key: value for key, value in scope.items() if key != "connection"}
        self._task = asyncio.get_running_loop().create_task(self._run(app, inner))

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        async def receive() -> Message:
            await self._abandoned.wait()
            return {"type": "http.disconnect"}

        try:
            await app(scope, receive, self._append)
        except asyncio.CancelledError:
            self._error = shutting_down()
            raise
        except Exception as error:  # noqa: BLE001  every reader raises it again, to its own error handling
            self._error = error
        finally:
            self.is_done = True
            self.ended_at = time.monotonic()
            outcome = self._outcome()
            self._outcome = lambda: outcome  # the request is not needed any more
            while self.done_callbacks:
                self.done_callbacks.pop(0)(self)
            self._wake()

    async def _append(self, message: Message) -> None:
        self._messages.append(message)
        self.size_bytes += len(message.get("body", b""))
        self._wake()
        if self.size_bytes > self._limit_bytes:
            self.is_too_long = True
            await self._discard_body()

    async def _discard_body(self) -> None:
        """Beyond the limit, wait for the readers and drop the bytes that they have read."""
        while any(at < len(self._messages) for at in self._readers.values()):
            await self._changed.wait()
        for message in self._messages[:-1]:
            message.pop("body", None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- reading

    @property
    def status(self) -> int:
        """Return the HTTP status; 0 before it is known."""
        return int(self._messages[0]["status"]) if self._messages else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the answer ended normally: a retry would not improve it."""
        return (
            self.is_done
            and self._error is None
            and self.status == 200
            and not self.is_too_long
            and self._outcome() in _COMPLETE
        )

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)

    @property
    def is_stream(self) -> bool:
        headers = dict(self._messages[0]["headers"]) if self._messages else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    def abandon(self) -> None:
        """End generation at its next step, as if the client had left."""
        self._abandoned.set()

    async def read(self, receive: Receive, send: Send, transform: BodyFilter = bytes) -> None:
        """Send the answer from its beginning, until it or the reader's connection ends.

        Raises what generating it raised.
        """
        reader = object()
        self._readers[reader] = 0
        if self._timer is not None:
            self._timer.cancel()
        try:
            await unless(disconnected(receive), self._read(reader, send, transform))
        finally:
            del self._readers[reader]
            self._wake()
            if not self._readers and not self.is_done:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.unread_s, self._abandoned.set)

    async def _read(self, reader: object, send: Send, transform: BodyFilter) -> None:
        while True:
            at = self._readers[reader]
            if at < len(self._messages):
                message = dict(self._messages[at])  # middlewares add headers to their copy
                if message["type"] == "http.response.body":
                    message["body"] = transform(message.get("body", b""))
                await send(message)
                self._readers[reader] = at + 1
                self._wake()
            elif self.is_done:
                if self._error is not None:
                    raise self._error
                return
            else:
                await self._changed.wait()


class AnswerJournal:
    """Journaled answers by API key and id, bounded in number, bytes and time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._answers: dict[tuple[str, str], JournaledAnswer] = {}

    def find(self, key: str, name: str) -> JournaledAnswer | None:
        """Return the answer with this id, unless it was evicted."""
        self._evict()
        return self._answers.get((key, name))

    def add(self, key: str, name: str, answer: JournaledAnswer) -> None:
        """Add an answer; it is removed when it fails, or is evicted later."""
        self._answers[key, name] = answer

        def ended(done: JournaledAnswer) -> None:
            if not done.is_complete and self._answers.get((key, name)) is done:
                del self._answers[key, name]
            self._evict()

        answer.done_callbacks.append(ended)

    def remove(self, key: str, name: str) -> None:
        """Remove an answer. Raises KeyError."""
        del self._answers[key, name]

    def _evict(self) -> None:
        """Drop expired answers, and the oldest beyond a key's number or the bytes of all keys."""
        oldest = time.monotonic() - self._limits.kept_s
        number: Counter[str] = Counter()
        size_bytes = 0
        for (key, name), answer in reversed(list(self._answers.items())):
            if not answer.is_done:
                continue
            number[key] += 1
            size_bytes += answer.size_bytes
            if (
                answer.ended_at < oldest
                or number[key] > self._limits.kept_answers
                or size_bytes > self._limits.kept_bytes
            ):
                self._answers.pop((key, name)).attachment = None
