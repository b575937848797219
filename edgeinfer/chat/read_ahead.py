"""Has the engine read a question before it is asked: while the user types, once a file is attached.

Enter then waits for the last words alone. What was read stays in the engine's KV cache, so a text that
changes costs nothing: the next one is read from where they differ. Nothing of it reaches the disk
before it is sent: who deletes a line that was typed has left it nowhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from edgeinfer.chat import commands
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.events import Event, Finished, Progress
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest

#: Who types without a pause is read along this often, in seconds.
ALONG_S = 1.0


@dataclass(slots=True, eq=False)
class Reading:
    """What an engine is to read, and its reading of it once that has begun."""

    engine: Engine
    request: GenerateRequest
    generation: Generation | None = None


class ReadAhead:
    """Reads what would be asked, at the engine's lowest priority; at most one request at a time.

    `remembered` counts the tokens of it that need not be computed any more, once the engine has said.
    """

    def __init__(self, session: ChatSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self.enabled = True  # a rehearsal before a park turns it off: no thread may be left over
        self.remembered = 0
        self._conversation = 0
        self._state: tuple[object, ...] = ()
        self._words = ""
        self._text = ""
        self._read_at = 0.0
        self._reading: Reading | None = None

    def look(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> bool:
        """Look at what stands in the composer, some times a second. Return whether to call `begin`.

        True once the text has stood still since the last look, or `ALONG_S` after the last time; only
        for whole words, and only while no answer is being written. What is being read is read to its
        end where the text only goes on: who types faster than the engine computes would else stop all
        of it.
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
        words = "" if commands.is_command(text.strip()) else whole_words(text)
        state = self._state_of(attachments, editing)
        if (state, words) == (self._state, self._words):
            return False
        if self._reading is not None and state == self._state and words.startswith(self._words):
            return False
        self.stop()
        self._state, self._words = state, words
        if session.engine is None or session.busy:
            return False
        request = session.request_if_sent(words, attachments, editing)
        if request is None:
            return False
        self._read_at = self._clock()
        is_open = bool(words or attachments)
        early = msgspec.structs.replace(
            request,
            max_tokens=0,
            background=True,
            continue_final=is_open,
            cache_on_disk=not (is_open or editing is not None),
        )
        self._reading = Reading(session.engine, early)
        return True

    def rest(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> None:
        """Take this as read: nothing is read before something changes."""
        self._words = "" if commands.is_command(text.strip()) else whole_words(text)
        self._state = self._state_of(attachments, editing)

    def _state_of(self, attachments: Sequence[Attachment], editing: int | None) -> tuple[object, ...]:
        session = self._session
        said = (session.conversation.head_id, session.conversation.system_prompt)
        return (session.engine, session.busy, *said, *attachments, editing)

    def begin(self) -> None:
        """Have the engine read what is wanted, and follow that, in a thread of its own."""
        threading.Thread(target=self.read_and_follow, name="read ahead", daemon=True).start()

    def read_and_follow(self) -> None:
        """Have the engine read what is wanted, and see it to its end."""
        if reading := self.read():
            self.follow(reading)

    def follow(self, reading: Reading) -> None:
        """Note how much is read, until all of it is."""
        assert reading.generation is not None
        with contextlib.suppress(EdgeInferError):  # shown when it is asked
            for event in reading.generation:
                if reading is self._reading:
                    self._note(event)
        if reading is self._reading:
            self._reading = None

    def read(self) -> Reading | None:
        """Have the engine read what is wanted, and return that. Blocks while it is tokenized."""
        reading = self._reading
        if reading is None:
            return None
        try:
            reading.generation = reading.engine.submit(reading.request)
        except EdgeInferError:  # shown when it is asked
            self._reading = None
            return None
        if self._reading is not reading:  # stopped meanwhile
            reading.generation.cancel()
        return reading

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress) and not event.queued:
            self.remembered = event.done_tokens
        elif isinstance(event, Finished) and event.reason not in ("cancelled", "deadline"):
            self.remembered = event.usage.prompt_tokens

    def stop(self) -> None:
        """Stop reading; what was read is kept by the engine. Any thread."""
        reading, self._reading = self._reading, None
        if reading is not None and reading.generation is not None:
            reading.generation.cancel()


def whole_words(text: str) -> str:
    """Return `text` without the word that is being typed, which may be another one in a moment."""
    if text[-1:].isspace():
        return text.rstrip()
    words = text.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else ""
