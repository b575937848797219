"""Has the engine read a question before it is asked: while the user types, once a file is attached.

Enter then waits for the last words alone. What was read stays in the engine's KV cache, so a text that
changes costs nothing: the next one is read from where they differ. Nothing of it reaches the disk
before it is sent: who deletes a line that was typed has left it nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from edgeinfer.chat.commands import slash
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.events import Event, Finished, Progress
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest

#: Who types without a pause is read along this often, in seconds.
ALONG_S = 2.0

_Wanted = tuple[Engine, GenerateRequest]


class ReadAhead:
    """Reads what would be asked, at the engine's lowest priority; at most one request at a time.

    `remembered` counts the tokens of it that need not be computed any more, once the engine has said.
    """

    def __init__(self, session: ChatSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self.enabled = True  # a rehearsal before a park turns it off: no thread may be left over
        self.remembered = 0
        self._lock = threading.Lock()
        self._conversation = 0
        self._state: tuple[object, ...] = ()
        self._text = ""
        self._read_at = 0.0
        self._wanted: _Wanted | None = None
        self._running: Generation | None = None

    def look(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> bool:
        """Look at what stands in the composer, some times a second. Return whether to call `begin`.

        True once the text has stood still since the last look, or `ALONG_S` after the last time; only
        for whole words, and only while no answer is being written.
        """
        if not self.enabled:
            return False
        paused, self._text = text == self._text, text
        if not paused and self._clock() - self._read_at < ALONG_S:
            return False
        session = self._session
        if session.conversation.id != self._conversation:
            self._conversation = session.conversation.id
            self.remembered = 0
        words = "" if slash.is_command(text.strip()) else whole_words(text)
        state = self._state_of(words, attachments, editing)
        if state == self._state:
            return False
        self.stop()
        self._state = state
        if session.engine is None or session.busy:
            return False
        request = session.request_if_sent(words, attachments, editing)
        if request is None:
            return False
        self._read_at = self._clock()
        is_stored = not (words or attachments or editing is not None)
        early = msgspec.structs.replace(request, max_tokens=0, cache_on_disk=is_stored)
        self._wanted = (session.engine, early)
        return True

    def rest(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> None:
        """Take this as read: nothing is read before something changes."""
        words = "" if slash.is_command(text.strip()) else whole_words(text)
        self._state = self._state_of(words, attachments, editing)

    def _state_of(
        self, words: str, attachments: Sequence[Attachment], editing: int | None
    ) -> tuple[object, ...]:
        session = self._session
        said = (session.conversation.head_id, session.conversation.system_prompt)
        return (session.engine, session.busy, *said, words, *attachments, editing)

    def begin(self) -> None:
        """Have the engine read what is wanted, and follow that, in a thread of its own."""
        threading.Thread(target=self._read_and_follow, name="read ahead", daemon=True).start()

    def _read_and_follow(self) -> None:
        self.read()
        running = self._running
        if running is None:
            return
        try:
            for event in running:
                if running is self._running:
                    self._note(event)
        except EdgeInferError:  # shown when it is asked
            return

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress) and not event.queued:
            self.remembered = event.done_tokens
        elif isinstance(event, Finished) and event.reason not in ("cancelled", "deadline"):
            self.remembered = event.usage.prompt_tokens

    def read(self) -> None:
        """Have the engine read what is wanted. Blocks while it is tokenized."""
        with self._lock:
            wanted = self._wanted
            if wanted is None:
                return
            engine, request = wanted
            try:
                self._running = engine.submit(request)
            except EdgeInferError:  # shown when it is asked
                return
            if self._wanted is not wanted:  # stopped meanwhile
                self._running.cancel()

    def stop(self) -> None:
        """Stop reading; what was read is kept by the engine. Any thread."""
        self._wanted = None
        if self._running is not None:
            self._running.cancel()


def whole_words(text: str) -> str:
    """Return `text` without the word that is being typed, which may be another one in a moment."""
    if text[-1:].isspace():
        return text.rstrip()
    words = text.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else ""
