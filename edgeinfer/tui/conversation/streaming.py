"""Streams an answer into the transcript: stored first, then shown.

Drawing shares the processor with the engine's threads, so it is rationed: a pause follows each drawing,
so long that drawing takes at most `SHARE` of one core, and at least a thirtieth of a second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from edgeinfer.chat.history.values import Turn
from edgeinfer.chat.session import Answer
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.events import Progress
from edgeinfer.tui.drawing.entry import AnswerEntry
from edgeinfer.tui.widgets.transcript import Transcript

#: Share of one core that drawing may take while an answer streams.
SHARE = 0.04

#: Seconds after which a thread that draws must let another run, while an answer streams. Python's 5 ms
#: would hold up every token that comes while something is drawn: the engine needs the interpreter for a
#: moment between two.
_SWITCH_S = 0.0005
_FASTEST_S = 1 / 30
_SLOWEST_S = 0.25


class Pace:
    """Says how long to wait after a drawing, from the processor time of this thread since the last."""

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu
        self._last = cpu()
        self.pause_s = _FASTEST_S

    def drawn(self) -> float:
        """Call once a drawing. Return the pause before the next in seconds, smoothed."""
        now = self._cpu()
        wanted = min(max((now - self._last) / SHARE, _FASTEST_S), _SLOWEST_S)
        self._last = now
        self.pause_s += (wanted - self.pause_s) * 0.3
        return self.pause_s


class Streaming:
    """One answer on its way into its entry in the transcript."""

    def __init__(
        self, answer: Answer, entry: AnswerEntry, transcript: Transcript, pace: Pace | None = None
    ) -> None:
        self.answer = answer
        self.entry = entry
        self.transcript = transcript
        self.tokens = 0
        self.began = time.monotonic()
        self._pace = pace or Pace()
        self._due = asyncio.Event()

    async def run(self) -> tuple[Turn, EdgeInferError | None]:
        """Follow the generation to its end. Return the ended turn, and the error that broke it off."""
        drawing = asyncio.create_task(self._draw_as_due())
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        error: EdgeInferError | None = None
        try:
            async for event in self.answer.generation:
                self.answer.add(event)
                self.tokens += 1
                self._due.set()
        except EdgeInferError as failure:
            error = failure
            self.answer.fail(failure)
        finally:
            drawing.cancel()
            sys.setswitchinterval(switch_s)
        self._show()
        return self.answer.done or self.answer.abandon(), error

    async def _draw_as_due(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._show()
            await asyncio.sleep(self._pace.drawn())

    def _show(self) -> None:
        piece = self.answer.flush()
        if piece.text or piece.reasoning:
            self.entry.grow(piece.text, piece.reasoning)
        elif not self.answer.text and self.answer.progress is not None:
            self.entry.wait(_waiting_for(self.answer.progress))
        else:
            return
        self.transcript.redrawn(self.entry)

    @property
    def tokens_per_s(self) -> float:
        """The rate since it began, roughly; the exact one comes with the end."""
        elapsed = time.monotonic() - self.began
        return self.tokens / elapsed if elapsed > 0.2 else 0.0


def _waiting_for(prefill: Progress) -> str:
    if prefill.queued:
        return "waiting for its turn…"
    if prefill.total_tokens <= 512:
        return "…"
    return f"reading {prefill.done_tokens:,} of {prefill.total_tokens:,} tokens…"
