"""Answers that are made once and may be read again, by several at once, or from where one left off.

A kept answer is made by a task of its own, so that it outlives the connection that asked for it.
Whoever asks reads what is there and waits for the rest. Without a reader it is given up after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.runtime.events import FinishReason
from edgeinfer.server.connection import disconnected
from edgeinfer.server.limits import Limits
from edgeinfer.server.problems import shutting_down

#: Change a body before a reader gets it, e.g. to leave out what it has.
Cut = Callable[[bytes], bytes]
_WHOLE = frozenset(get_args(FinishReason)) - {"cancelled"} | {""}


class Kept:
    """One answer, as the ASGI messages that tell it. Lives on the event loop."""

    def __init__(self, limit_bytes: int, outcome: Callable[[], str]) -> None:
        #: What a dialect keeps beside the answer.
        self.about: object = None
        #: Seconds for which it goes on with nobody reading; 0 ends it when its reader leaves.
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
        self._waiting: set[asyncio.Future[None]] = set()
        self._given_up = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        #: Told when it has ended, however that was.
        self.when_ended: list[Callable[[Kept], None]] = []

    # --- making

    def start(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        """Have `app` answer the request, whose body was read."""
        # the way past the event loop writes to one connection, and this answer has none of its own
        inner = {key: value for key, value in scope.items() if key != "connection"}
        self._task = asyncio.get_running_loop().create_task(self._make(app, inner, body))

    async def _make(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await self._given_up.wait()
            return {"type": "http.disconnect"}

        try:
            await app(scope, receive, self._take)
        except asyncio.CancelledError:
            self._error = shutting_down()
            raise
        except Exception as error:  # noqa: BLE001  every reader raises it again, to its own error handling
            self._error = error
        finally:
            self.is_done = True
            self.ended_at = time.monotonic()
            for told in self.when_ended:
                told(self)
            self._wake()

    async def _take(self, message: Message) -> None:
        self._messages.append(message)
        self.size_bytes += len(message.get("body", b""))
        self._wake()
        if self.size_bytes > self._limit_bytes:
            self.is_too_long = True
            await self._keep_no_more()

    async def _keep_no_more(self) -> None:
        """An answer beyond the limit goes as fast as its readers, and what they have is dropped."""
        while any(at < len(self._messages) for at in self._readers.values()):
            await self._change()
        for message in self._messages[:-1]:
            message.pop("body", None)

    def _change(self) -> asyncio.Future[None]:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return waiting

    def _wake(self) -> None:
        for waiting in tuple(self._waiting):
            if not waiting.done():
                waiting.set_result(None)

    # --- reading

    @property
    def status(self) -> int:
        """Its HTTP status; 0 before it is known."""
        return int(self._messages[0]["status"]) if self._messages else 0

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should: another try would get no better answer."""
        return (
            self.is_done
            and self._error is None
            and self.status == 200
            and not self.is_too_long
            and self._outcome() in _WHOLE
        )

    @property
    def body(self) -> bytes:
        """What is there of its body."""
        return b"".join(message.get("body", b"") for message in self._messages)

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        headers = dict(self._messages[0]["headers"]) if self._messages else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    def give_up(self) -> None:
        """End it at its next step, as if its client had left."""
        self._given_up.set()

    async def read(self, receive: Receive, send: Send, cut: Cut = bytes) -> None:
        """Send it from its beginning, until it or the reader's connection ends.

        Raises what making it raised.
        """
        reader = object()
        self._readers[reader] = 0
        if self._timer is not None:
            self._timer.cancel()
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await self._read(reader, gone, send, cut)
        finally:
            gone.cancel()
            del self._readers[reader]
            self._wake()
            if not self._readers and not self.is_done:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.unread_s, self._given_up.set)

    async def _read(self, reader: object, gone: asyncio.Future[None], send: Send, cut: Cut) -> None:
        while not gone.done():
            at = self._readers[reader]
            if at < len(self._messages):
                message = dict(self._messages[at])  # whoever passes it on adds headers of its own
                if message["type"] == "http.response.body":
                    message["body"] = cut(message.get("body", b""))
                await send(message)
                self._readers[reader] = at + 1
                self._wake()
            elif self.is_done:
                if self._error is not None:
                    raise self._error
                return
            else:
                changed = self._change()
                await asyncio.wait({changed, gone}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()


class KeptAnswers:
    """Answers by API key and the name it gave them, bounded in number, bytes and time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: dict[tuple[str, str], Kept] = {}

    def __len__(self) -> int:
        self._drop()
        return len(self._kept)

    def find(self, key: str, name: str) -> Kept | None:
        """The answer that this key has called so, unless it was dropped."""
        self._drop()
        return self._kept.get((key, name))

    def add(self, key: str, name: str, kept: Kept) -> None:
        """Keep an answer until it is dropped; one that fails is dropped when it ends."""
        self._kept[key, name] = kept

        def ended(done: Kept) -> None:
            if not done.is_whole and self._kept.get((key, name)) is done:
                del self._kept[key, name]

        kept.when_ended.append(ended)

    def remove(self, key: str, name: str) -> None:
        """Drop an answer now. Raises KeyError."""
        del self._kept[key, name]

    def _drop(self) -> None:
        """Drop what ended too long ago, and the oldest beyond a key's number and the bytes of all."""
        oldest = time.monotonic() - self._limits.kept_s
        number: Counter[str] = Counter()
        size_bytes = 0
        for (key, name), kept in reversed(list(self._kept.items())):
            if not kept.is_done:
                continue
            number[key] += 1
            size_bytes += kept.size_bytes
            if (
                kept.ended_at < oldest
                or number[key] > self._limits.kept_answers
                or size_bytes > self._limits.kept_bytes
            ):
                del self._kept[key, name]
