"""A request on its way through the copies: what its client reads, and which copy it is with."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import msgspec

from edgeinfer import beginnings
from edgeinfer.errors import EngineClosedError, EngineError
from edgeinfer.runtime.events import Finished, Progress
from edgeinfer.runtime.generation import EventStream, Item
from edgeinfer.runtime.requests import GenerateRequest


class Ticket:
    """One request, which may be given to another copy until the one it is with has begun it.

    `on_end` is called when its stream has ended, `on_lost` when its copy ended before it had begun
    it; both from any thread, with no lock of the ticket's held.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_end: Callable[[Ticket], None],
        on_lost: Callable[[Ticket], None],
    ) -> None:
        self.request = request
        self.beginnings = _names(request)
        self.stream = EventStream(self.cancel)
        self.since = time.monotonic()
        self._on_end, self._on_lost = on_end, on_lost
        self._changing = threading.RLock()
        self._source: EventStream | None = None
        self._is_begun = False
        self._is_cancelled = False

    @property
    def is_waiting(self) -> bool:
        """Whether no copy has begun to compute it."""
        return not self._is_begun

    def follow(self, source: EventStream) -> None:
        """Hand on what comes from `source`, which a copy gave for this request."""
        with self._changing:
            self._source = source
            is_cancelled = self._is_cancelled
        source.pipe(functools.partial(self._take, source))
        if is_cancelled:
            source.cancel()

    def withdraw(self) -> bool:
        """Take it back from its copy, unless that has begun it."""
        with self._changing:
            source = self._source
            if source is None or self._is_begun or self._is_cancelled:
                return False
            self._source = None
        source.cancel()
        return True

    def fail(self, error: EngineError) -> None:
        """End it with `error`."""
        self.stream.put(error)
        self._on_end(self)

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        with self._changing:
            self._is_cancelled = True
            source = self._source
        if source is not None:
            source.cancel()

    def _take(self, source: EventStream, item: Item) -> None:
        with self._changing:
            if source is not self._source:
                return
            is_lost = isinstance(item, EngineClosedError) and not (self._is_begun or self._is_cancelled)
            if is_lost:
                self._source = None
            else:
                self._is_begun = self._is_begun or not (isinstance(item, Progress) and item.queued)
                self.stream.put(item)
        if is_lost:
            self._on_lost(self)
        elif isinstance(item, Finished | EngineError):
            self._on_end(self)


def _names(request: GenerateRequest) -> tuple[int, ...]:
    """Name what a request begins with; its salt first, for nothing is shared with others."""
    prompt = request.prompt
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt or ()))
    read = msgspec.to_builtins([request.tools, request.messages, request.infill])
    return beginnings.names(request.cache_salt, read, text)
