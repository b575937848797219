"""Pass a request's events from the decode thread to a consumer, or collect them into an answer."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator

from edgeinfer.errors import EngineError, UsageError
from edgeinfer.runtime.events import (
    Event,
    Finished,
    Progress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)

#: An event, or the error that ends the stream.
Item = Event | EngineError


class EventStream:
    """The `Generation` of a request. One thread calls `put`, which never blocks; one consumer iterates.

    A consumer that stops iterating cancels the request.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._on_cancel = on_cancel
        self._wake: Callable[[], None] | None = None
        self._tap: Callable[[Event], bool] | None = None
        self._sink: Callable[[Item], None] | None = None
        self._sink_lock = threading.RLock()
        self._is_iterated = False
        self.has_ended = False

    def put(self, item: Item) -> None:
        """Add an event, or the error that ends the stream. After the end, events are dropped."""
        if self.has_ended:
            return
        if isinstance(item, Finished | EngineError):
            self.has_ended = True
        elif self._tap and self._wake and self._items.empty() and self._tap(item):
            return
        with self._sink_lock:
            if self._sink is not None:
                self._sink(item)
                return
            self._items.put(item)
        wake = self._wake
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """End the request at the next step. Thread-safe; idempotent."""
        self._on_cancel()

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Offer each event to `tap` before the consumer, as `Generation.tap` says."""
        self._tap = tap

    def pipe(self, sink: Callable[[Item], None]) -> None:
        """Send all events to `sink`: buffered ones in this call, later ones on the thread of `put`."""
        self._mark_iterated()
        with self._sink_lock:
            self._sink = sink
            while not self._items.empty():
                sink(self._items.get_nowait())

    def _mark_iterated(self) -> None:
        if self._is_iterated:
            raise UsageError("a generation can be iterated only once", hint="keep its events in a list")
        self._is_iterated = True

    def __iter__(self) -> Iterator[Event]:
        self._mark_iterated()
        try:
            while True:
                item = self._items.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            if not self.has_ended:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        self._mark_iterated()
        try:
            while True:
                item = await self._next()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            self._wake = None
            if not self.has_ended:
                self.cancel()

    async def _next(self) -> Item:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self._items.get_nowait()
            except queue.Empty:
                pass
            ready = asyncio.Event()

            def wake(ready: asyncio.Event = ready) -> None:
                self._wake = None
                with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                    loop.call_soon_threadsafe(ready.set)

            self._wake = wake
            if self._items.empty():  # an event may have arrived before `wake` was set
                await ready.wait()
            self._wake = None


class CollectedCall:
    """A tool call, assembled from its deltas."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self._fragments: list[str] = []

    def add(self, delta: ToolCallDelta) -> None:
        """Add a delta. The first delta has `id` and `name`, later ones have parts of the arguments."""
        self.id = self.id or delta.id
        self.name = self.name or delta.name
        self._fragments.append(delta.arguments)

    @property
    def arguments(self) -> str:
        """Arguments so far (JSON, complete at the end of the generation)."""
        return "".join(self._fragments)


class CollectedAnswer:
    """The answer so far, collected from events. `last_event` is None until the generation has ended."""

    def __init__(self, text: str = "", reasoning: str = "") -> None:
        self._text = [text]
        self._reasoning = [reasoning]
        self.calls: dict[int, CollectedCall] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: PromptLogprobs | None = None
        self.progress: Progress | None = None
        self.last_event: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.logprobs += event.logprobs
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                self.calls.setdefault(event.index, CollectedCall()).add(event)
            case PromptLogprobs():
                self.prompt = event
            case Progress():
                self.progress = event
            case Finished():
                self.last_event = event

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """Reasoning so far, without markers such as `<think>`."""
        return "".join(self._reasoning)

    @property
    def finish(self) -> Finished:
        """The last event; the generation must have ended."""
        assert self.last_event is not None
        return self.last_event


#: An answer loops if its end repeats one text (at most _LONGEST_PART characters) at least _TIMES times
#: over at least _SPAN characters.
_SPAN, _TIMES = 240, 4
_LONGEST_PART = 400
#: A repeat is found by searching the earlier text for the last 32 characters.
_KEY = 32
#: Matches the numbers of list items, which may differ between repeats.
_COUNTER = re.compile(r"^\s*\d+[.)]", re.MULTILINE)
#: A text is monotonous if more than half of its last 200 words end a sequence of four words that
#: occurred at least three times before. Code is not checked, because code repeats itself: 4 of 1,011
#: code files were monotonous, but none of 76 documents.
_SEQUENCE, _LAST_WORDS = 4, 200
_OCCURRENCES, _STALE_SHARE = 3, 0.5


class RepetitionWatch:
    """Detects that a model repeats one text in a loop, or the same few phrases all the time."""

    def __init__(self) -> None:
        self._tail = ""
        self._word = ""
        self._last_words: deque[str] = deque(maxlen=_SEQUENCE)
        self._occurrences: Counter[int] = Counter()
        self._stale: deque[bool] = deque(maxlen=_LAST_WORDS)
        self._is_in_code = False

    def add(self, text: str) -> int | None:
        """Add text; return after how many of its characters a loop was detected, None if there is none.

        The result does not depend on how the answer is split into pieces.
        """
        for i, character in enumerate(text, 1):
            self._tail = (self._tail + character)[-_TIMES * _LONGEST_PART :]
            if self._is_loop() or self._is_monotonous_with(character):
                return i
        return None

    def _is_loop(self) -> bool:
        text = _COUNTER.sub("", self._tail)
        repeat_start = text.rfind(text[-_KEY:], 0, -1)
        length = len(text) - _KEY - repeat_start
        span = max(_SPAN, _TIMES * length)
        return repeat_start >= 0 and span <= len(text) and text[-span:-length] == text[length - span :]

    def _is_monotonous_with(self, character: str) -> bool:
        if character.isalnum():
            self._word += character
            return False
        if self._tail.endswith("```") and not self._tail.endswith("````"):
            self._is_in_code = not self._is_in_code
        word, self._word = self._word, ""
        if not word or self._is_in_code:
            return False
        self._last_words.append(word)
        sequence = hash(tuple(self._last_words))
        self._stale.append(self._occurrences[sequence] >= _OCCURRENCES)
        self._occurrences[sequence] += 1
        return sum(self._stale) > _STALE_SHARE * _LAST_WORDS
