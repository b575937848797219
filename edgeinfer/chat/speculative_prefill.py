"""Speculative prefill: the engine prefills a question while the user types or attaches files.

Then Enter waits only for the last tokens. The prefix stays in the KV cache, so changed text is
prefilled from the first difference on. Unsent text never reaches the on-disk prefix cache.
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

#: Interval (s) between prefills while the user types without a pause.
ALONG_S = 1.0


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A prefill-only request, and its generation once submitted."""

    engine: Engine
    request: GenerateRequest
    generation: Generation | None = None


class SpeculativePrefill:
    """Prefills the request that would be sent, at the lowest priority; one request at a time.

    `cached_tokens` counts its cached tokens once the engine has reported them.
    """

    def __init__(self, session: ChatSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self.enabled = True  # off during a rehearsal, because a parked process may have no such thread
        self.cached_tokens = 0
        self._conversation = 0
        self._state: tuple[object, ...] = ()
        self._prefilled = ""
        self._text = ""
        self._began_at = 0.0
        self._prefill: PrefillRequest | None = None

    def check_input(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> bool:
        """Check the input field; called some times per second. Return True if `start` should be called.

        That is the case once the text has not changed since the last check, or `ALONG_S` after the last
        prefill, only for whole words, and only while no answer is generated. A running prefill
        continues if text was only appended; otherwise fast typing would cancel each one.
        """
        if not self.enabled:
            return False
        paused, self._text = text == self._text, text
        if not paused and self._clock() - self._began_at < ALONG_S:
            return False
        session = self._session
        if session.conversation.id != self._conversation:
            self._conversation = session.conversation.id
            self.cached_tokens = 0
        complete = "" if commands.is_command(text.strip()) else whole_words(text)
        state = self._state_of(attachments, editing)
        if (state, complete) == (self._state, self._prefilled):
            return False
        if self._prefill is not None and state == self._state and complete.startswith(self._prefilled):
            return False
        self.stop()
        self._state, self._prefilled = state, complete
        if session.engine is None or session.busy:
            return False
        try:
            request = session.request_if_sent(complete, attachments, editing)
        except EdgeInferError:  # shown when the question is sent
            return False
        if request is None:
            return False
        self._began_at = self._clock()
        is_open = bool(complete or attachments)
        early = msgspec.structs.replace(
            request,
            max_tokens=0,
            background=True,
            continue_final=is_open,
            cache_on_disk=not (is_open or editing is not None),
        )
        self._prefill = PrefillRequest(session.engine, early)
        return True

    def _state_of(self, attachments: Sequence[Attachment], editing: int | None) -> tuple[object, ...]:
        session = self._session
        said = (session.conversation.head_id, session.conversation.system_prompt)
        return (session.engine, session.busy, *said, *attachments, editing)

    def start(self) -> None:
        """Submit the pending prefill and follow it, in a thread."""
        threading.Thread(target=self.run, name="read ahead", daemon=True).start()

    def run(self) -> None:
        """Submit the pending prefill and follow it to its end."""
        if prefill := self.submit():
            self.follow(prefill)

    def follow(self, prefill: PrefillRequest) -> None:
        """Record the progress of a prefill until it ends."""
        assert prefill.generation is not None
        with contextlib.suppress(EdgeInferError):  # shown when the question is sent
            for event in prefill.generation:
                if prefill is self._prefill:
                    self._note(event)
        if prefill is self._prefill:
            self._prefill = None

    def submit(self) -> PrefillRequest | None:
        """Submit the pending prefill and return it. Blocks while the text is tokenized."""
        prefill = self._prefill
        if prefill is None:
            return None
        try:
            prefill.generation = prefill.engine.submit(prefill.request)
        except EdgeInferError:  # shown when the question is sent
            self._prefill = None
            return None
        if self._prefill is not prefill:  # stopped meanwhile
            prefill.generation.cancel()
        return prefill

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress) and not event.queued:
            self.cached_tokens = event.done_tokens
        elif isinstance(event, Finished) and event.reason not in ("cancelled", "deadline"):
            self.cached_tokens = event.usage.prompt_tokens

    def stop(self) -> None:
        """Cancel the prefill; the finished part stays cached. Any thread."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None and prefill.generation is not None:
            prefill.generation.cancel()


def whole_words(text: str) -> str:
    """Return `text` without its last word, which the user may still be typing."""
    if text[-1:].isspace():
        return text.rstrip()
    pieces = text.rsplit(maxsplit=1)
    return pieces[0] if len(pieces) == 2 else ""
