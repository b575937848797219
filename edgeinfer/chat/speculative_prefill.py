"""Speculative prefill: prefill a question while the user still types it or attaches files.

After Enter, only the last tokens must be prefilled. The prefix stays in the KV cache; if the user
changes the text, prefilling begins again at the first difference. Unsent text is never written to the
prefix cache on disk.
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
TYPING_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A request that only prefills a prompt. `generation` is None until `engine` accepts `request`."""

    engine: Engine
    request: GenerateRequest
    generation: Generation | None = None


class SpeculativePrefill:
    """Prefills the typed question before it is sent, at the lowest priority, one prefill at a time.

    `cached_tokens` is how many tokens of the prompt with this question are in the KV cache, as last
    reported by the engine.
    """

    def __init__(self, session: ChatSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        # `tui.rehearsal` sets this to False, because a process that is saved in a snapshot must not
        # have a prefill thread
        self.enabled = True
        self.cached_tokens = 0
        self._conversation = 0
        self._state: tuple[object, ...] = ()
        self._prefilled = ""
        self._text = ""
        self._began_at = 0.0
        self._prefill: PrefillRequest | None = None

    def check_input(self, text: str, attachments: Sequence[Attachment], editing: int | None) -> bool:
        """Prepare a prefill if the input has changed; return whether to call `start`.

        The chat calls this several times per second. While the user types, prefills begin at least
        `TYPING_INTERVAL_S` apart; once the user pauses, a prefill begins at once. Only whole words are
        prefilled, and nothing while an answer is generated. Appended text does not cancel a running
        prefill, because fast typing would cancel all of them. `editing`: id of the question that the
        text will replace.
        """
        if not self.enabled:
            return False
        paused, self._text = text == self._text, text
        if not paused and self._clock() - self._began_at < TYPING_INTERVAL_S:
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
        except EdgeInferError:  # the user sees the error when the question is sent
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
        """Run the prepared prefill in a thread."""
        threading.Thread(target=self.run, name="read ahead", daemon=True).start()

    def run(self) -> None:
        """Run the prepared prefill in this thread, until the prefill ends."""
        if prefill := self.submit():
            self.follow(prefill)

    def follow(self, prefill: PrefillRequest) -> None:
        """Record the progress of a prefill until it ends."""
        assert prefill.generation is not None
        with contextlib.suppress(EdgeInferError):  # the user sees the error when the question is sent
            for event in prefill.generation:
                if prefill is self._prefill:
                    self._note(event)
        if prefill is self._prefill:
            self._prefill = None

    def submit(self) -> PrefillRequest | None:
        """Submit the prepared prefill and return it; None if it was stopped or refused.

        Blocks while the engine tokenizes the prompt.
        """
        prefill = self._prefill
        if prefill is None:
            return None
        try:
            prefill.generation = prefill.engine.submit(prefill.request)
        except EdgeInferError:  # the user sees the error when the question is sent
            self._prefill = None
            return None
        if self._prefill is not prefill:  # `stop` was called meanwhile
            prefill.generation.cancel()
        return prefill

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress) and not event.queued:
            self.cached_tokens = event.done_tokens
        elif isinstance(event, Finished) and event.reason not in ("cancelled", "deadline"):
            self.cached_tokens = event.usage.prompt_tokens

    def stop(self) -> None:
        """Cancel the prefill; prefilled tokens stay in the KV cache. Thread-safe."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None and prefill.generation is not None:
            prefill.generation.cancel()


def whole_words(text: str) -> str:
    """Return `text` without its last word, which the user may still be typing."""
    if text[-1:].isspace():
        return text.rstrip()
    pieces = text.rsplit(maxsplit=1)
    return pieces[0] if len(pieces) == 2 else ""
