"""Speculative prefill: the engine prefills a question while the user types or attaches files.

Enter then waits for the last tokens alone. The prefix stays in the KV cache, so a changed text is
prefilled from where it differs. No unsent text reaches the prefix cache on disk.
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

#: Interval (s) of prefill while the user types without a pause.
ALONG_S = 1.0


@dataclass(slots=True, eq=False)
class Reading:
    """A prefill-only request, and its generation once submitted."""

    engine: Engine
    request: GenerateRequest
    generation: Generation | None = None


class ReadAhead:
    """Prefills the request that would be sent, at the lowest priority; one request at a time.

    `remembered` counts its cached tokens, once the engine has reported them.
    """

    def __init__(self, session: ChatSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self.enabled = True  # off in a rehearsal before a park, which must leave no thread
        self.remembered = 0
        self._conversation = 0
        self._state: tuple[object, ...] = ()
        self._words = ""
        self._text = ""
        self._read_at = 0.0
        self._reading: Reading | None = None

    def look(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> bool:
        """Look at the composer, some times a second. Return True if `begin` is to be called.

        That is once the text has not changed since the last look, or `ALONG_S` after the last prefill;
        only for whole words, and only while no answer is generated. A running prefill is left to end
        if the text was only appended to: otherwise fast typing would cancel every one of them.
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
        """Treat this text as prefilled, so that only a change begins a prefill."""
        self._words = "" if commands.is_command(text.strip()) else whole_words(text)
        self._state = self._state_of(attachments, editing)

    def _state_of(self, attachments: Sequence[Attachment], editing: int | None) -> tuple[object, ...]:
        session = self._session
        said = (session.conversation.head_id, session.conversation.system_prompt)
        return (session.engine, session.busy, *said, *attachments, editing)

    def begin(self) -> None:
        """Submit the pending prefill and follow it, in a thread."""
        threading.Thread(target=self.read_and_follow, name="read ahead", daemon=True).start()

    def read_and_follow(self) -> None:
        """Submit the pending prefill and follow it to its end."""
        if reading := self.read():
            self.follow(reading)

    def follow(self, reading: Reading) -> None:
        """Record the progress of a prefill until it ends."""
        assert reading.generation is not None
        with contextlib.suppress(EdgeInferError):  # shown when it is sent
            for event in reading.generation:
                if reading is self._reading:
                    self._note(event)
        if reading is self._reading:
            self._reading = None

    def read(self) -> Reading | None:
        """Submit the pending prefill and return it. Blocks while the text is tokenized."""
        reading = self._reading
        if reading is None:
            return None
        try:
            reading.generation = reading.engine.submit(reading.request)
        except EdgeInferError:  # shown when it is sent
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
        """Cancel the prefill; the prefix computed so far stays cached. Any thread."""
        reading, self._reading = self._reading, None
        if reading is not None and reading.generation is not None:
            reading.generation.cancel()


def whole_words(text: str) -> str:
    """Return `text` without the word that is being typed, which may be another one in a moment."""
    if text[-1:].isspace():
        return text.rstrip()
    words = text.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else ""
