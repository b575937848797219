"""Show a session on the chat screen: turns, status line, streaming answer, loading model.

Drawing shares the processor with the engine's threads. So each drawing is followed by a pause of at
least a thirtieth of a second, and drawing takes at most `SHARE` of one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from textual.app import RenderResult
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.history.values import Stats, Turn
from edgeinfer.chat.session import ChatSession
from edgeinfer.chat.startup import ChatSetup, Engines
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Progress
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.tools.tool_use import ToolUse
from edgeinfer.tui.composer import Composer
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.transcript import Transcript


class StatusPart(NamedTuple):
    """A text in the status line.

    On a narrow terminal, the part with the lowest `weight` is left out first. If `shortens` is True,
    the part is only cut, as long as at least `_SHORTEST` cells of the text fit.
    """

    text: str
    weight: int
    style: str = ""
    shortens: bool = False


#: Minimum width (cells) at which the status line shows the hint at its right edge. A narrower one shows
#: only the parts on the left.
_LEAST_FOR_HINT = 60

#: Minimum length (cells) to which a part of the status line is cut. If even less fits, the part is left
#: out.
_SHORTEST = 14


class Status(Widget):
    """The status line: parts on the left, a hint at the right edge."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._parts: tuple[StatusPart, ...] = ()
        self._hint = ""

    def show(self, parts: tuple[StatusPart, ...], hint: str = "") -> None:
        """Show these parts and this hint; draw only if something has changed."""
        if (parts, hint) != (self._parts, self._hint):
            self._parts, self._hint = parts, hint
            self.refresh()

    def render(self) -> RenderResult:
        width = self.size.width
        hint = self._hint if width >= _LEAST_FOR_HINT else ""
        shown = [p for p in self._parts if p.text]
        while len(shown) > 1 and (over := _length(shown) + len(hint) + 2 - width) > 0:
            least = min(shown, key=lambda p: p.weight)
            index, length = shown.index(least), len(least.text) - over
            shown.remove(least)
            if least.shortens and length >= _SHORTEST:
                shown.insert(index, least._replace(text=f"{least.text[: length - 1]}…", weight=99))
        line = Content(" · ").join([Content.styled(p.text, p.style) for p in shown])
        gap = width - line.cell_length - len(hint)
        if hint and gap >= 2:
            line = Content.assemble(line, " " * gap, (hint, "dim"))
        return line.truncate(width, ellipsis=True)


def _length(parts: list[StatusPart]) -> int:
    return sum(len(p.text) for p in parts) + 3 * (len(parts) - 1)


class Loader:
    """Loads models in threads. Once a new load begins, the result of an earlier one is ignored."""

    @dataclass
    class Ended(Message):
        """Posted when the load with the number `serial` ends; `outcome` is the engine or the error."""

        serial: int
        model: str
        outcome: Engine | EdgeInferError

    def __init__(self, engines: Engines, post: Callable[[Message], object]) -> None:
        self._engines = engines
        self._post = post
        self.progress = ""
        self._model = ""
        self._serial = 0

    def start(self, model: str, n_ctx: int | None = None) -> None:
        """Load `model` in a thread, with a context of `n_ctx` tokens (None: the default).

        Does nothing if `n_ctx` is None and this model is being loaded already.
        """
        if self.progress and n_ctx is None and model == self._model:
            return
        self._model = model
        self._serial += 1
        self.progress = f"loading {model}…"
        # load in a daemon thread: if this were a Textual worker, the app could not end before the load
        arguments = (model, n_ctx, self._serial)
        threading.Thread(target=self._load, args=arguments, name=f"load {model}", daemon=True).start()

    @property
    def loading(self) -> str:
        """Name of the model that is being loaded, "" if none is."""
        return self._model if self.progress else ""

    @property
    def start_text(self) -> str:
        """Text on how the last model was loaded: `resumed in 84 ms`, without a time if unknown."""
        return self._engines.start_text

    @property
    def loaded(self) -> tuple[Engine | None, str]:
        """The engine that was loaded last, and its model; (None, "") before the first load."""
        return self._engines.engine, self._engines.model

    def finish(self, message: Ended) -> bool:
        """Clear the progress of the newest load; return False if `message` is from an older load."""
        if message.serial != self._serial:
            return False
        self.progress = ""
        return True

    def _load(self, model: str, n_ctx: int | None, serial: int) -> None:
        def progress(stage: str, fraction: float | None) -> None:
            done = "" if fraction is None else f" {fraction:.0%}"
            if serial == self._serial:
                self.progress = f"{stage}{done}"

        outcome: Engine | EdgeInferError
        try:
            outcome = self._engines.get(model, n_ctx, progress)
        except OSError as failure:  # the launcher, which starts workers, has ended
            outcome = EngineClosedError(f"{model} cannot be started: {failure}")
        except EdgeInferError as failure:
            outcome = failure
        with contextlib.suppress(RuntimeError):  # the app has ended meanwhile
            self._post(self.Ended(serial, model, outcome))

    def close(self) -> None:
        self._serial += 1
        self._engines.close()


#: Maximum share of one core that drawing takes while an answer streams.
SHARE = 0.04

#: Python's thread switch interval (s) while an answer streams. The default of 5 ms would delay tokens
#: during a drawing, because the engine needs the GIL for a moment between two tokens.
_SWITCH_S = 0.0005
_FASTEST_S = 1 / 30
_SLOWEST_S = 0.25


class Streaming:
    """Shows an answer in the transcript while it is generated."""

    def __init__(self, answer: AnswerWriter, entry: AnswerEntry, transcript: Transcript) -> None:
        self.answer = answer
        self.entry = entry
        self.transcript = transcript
        self.tokens = 0
        self.began = time.monotonic()
        self._due = asyncio.Event()

    async def run(self) -> tuple[Turn, EdgeInferError | None]:
        """Show the whole answer. Return the stored turn, and the error if the generation failed."""
        drawing = asyncio.create_task(self._draw_as_due())
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        error: EdgeInferError | None = None
        try:
            async for event in self.answer.generation:
                self.answer.add(event)
                if not isinstance(event, Progress):
                    self.began = self.began if self.tokens else time.monotonic()
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
        pause_s, before_s = _FASTEST_S, time.thread_time()
        while True:
            await self._due.wait()
            self._due.clear()
            self._show()
            now_s = time.thread_time()
            wanted_s = min(max((now_s - before_s) / SHARE, _FASTEST_S), _SLOWEST_S)
            before_s = now_s
            pause_s += (wanted_s - pause_s) * 0.3
            await asyncio.sleep(pause_s)

    def _show(self) -> None:
        piece = self.answer.flush()
        if piece.text or piece.reasoning:
            self.entry.grow(piece.text, piece.reasoning)
        elif not self.answer.text and self.answer.progress is not None:
            self.entry.wait(_waiting_for(self.answer.progress))
        else:
            return
        self.transcript.update_entry(self.entry)

    @property
    def tokens_per_s(self) -> float:
        """Estimated tokens/s since the first token; 0.0 until 0.2 s after that token."""
        elapsed = time.monotonic() - self.began
        return self.tokens / elapsed if self.tokens and elapsed > 0.2 else 0.0


def _waiting_for(prefill: Progress) -> str:
    if prefill.queued:
        return "waiting for its turn…"
    if prefill.total_tokens <= 512:
        return "…"
    return f"reading {prefill.done_tokens:,} of {prefill.total_tokens:,} tokens…"


class ChatView:
    """Shows `session` in the widgets of the chat screen.

    `Answering` sets `streaming` to the answer that is being generated (otherwise None), `summarising`
    to the generation of a summary (otherwise None), and `calling` to a text about running tools.
    `cached_tokens` is how many tokens of the open conversation are in the KV cache.
    """

    def __init__(self, setup: ChatSetup, session: ChatSession, loader: Loader) -> None:
        self.session = session
        self.loader = loader
        self.header = Static("", id="header", markup=False)
        self.transcript = Transcript(id="transcript")
        self.composer = Composer("Ask something", id="composer")
        self.status = Status(id="status")
        self.streaming: Streaming | None = None
        self.summarising: Generation | None = None
        self.cached_tokens = 0
        self.calling = ""
        self._setup = setup

    @property
    def model(self) -> str:
        """The model that answers, or will answer once it is loaded."""
        return self.loader.loading or self.session.model or self._setup.model

    def show_welcome(self) -> None:
        self.transcript.show([Welcome(self.model)])
        self.refresh_status()

    def show_session(self, *, stays: bool = False) -> None:
        """Show the open branch, and scroll to its end, or (`stays`) keep the scroll position."""
        transcript = self.transcript
        scroll_y = None if not stays or transcript.following else transcript.scroll_y
        entries = [self.entry(turn) for turn in self.session.path]
        if not entries:
            self.show_welcome()
            return
        transcript.show(entries)
        if scroll_y is not None:
            transcript.following = False
            transcript.scroll_to(y=scroll_y, animate=False, force=True)
        self.refresh_status()

    def entry(self, turn: Turn) -> Entry:
        alternative = self.session.alternatives(turn.id)
        if turn.role == "user":
            return Question(turn, alternative)
        if self.streaming is not None and self.streaming.answer.turn.id == turn.id:
            return self.streaming.entry
        return AnswerEntry(turn, alternative, streaming=turn.status == "streaming")

    def grow(self, turn: Turn | None, new: CollectedAnswer) -> None:
        """Add the text `new` to the shown answer `turn`, which another process writes."""
        for entry in self.transcript.entries:
            if turn is not None and isinstance(entry, AnswerEntry) and entry.turn_id == turn.id:
                entry.grow(new.text, new.reasoning)
                self.transcript.update_entry(entry)

    def note_prompt(self, answer: AnswerWriter) -> None:
        """Report how much of the answer's prompt was cached, which `edgeinfer ps` shows."""
        if answer.cache_report is not None:
            self._setup.host.note_prompt(answer.cache_report)

    def add_remark(self, entry: Entry) -> None:
        if any(isinstance(e, Welcome) for e in self.transcript.entries):
            self.transcript.show([])
        self.transcript.following = True
        self.transcript.add(entry)

    def show_use(self, use: ToolUse) -> None:
        """Show the result of a tool call in its answer."""
        for entry in self.transcript.entries:
            if isinstance(entry, AnswerEntry) and any(u.id == use.id for u in entry.turn.calls):
                calls = tuple(use if u.id == use.id else u for u in entry.turn.calls)
                entry.finish(msgspec.structs.replace(entry.turn, calls=calls), entry.alternative)
                self.transcript.update_entry(entry)

    def show_error(self, error: EdgeInferError, put_back: str = "") -> None:
        """Show an error with its hint. `put_back` goes into the input field if the field is empty."""
        self.add_remark(Remark(error.message, "error", hint(error)))
        self._put_back(put_back)

    def show_next_step(self, error: EdgeInferError, put_back: str) -> None:
        """Show only the hint of `error`, because the failed turn already shows the error's message.

        `put_back` goes into the input field if the field is empty.
        """
        if hint(error):
            self.add_remark(Remark("", hint=hint(error)))
        self._put_back(put_back)

    def _put_back(self, text: str) -> None:
        if text and not self.composer.text:
            self.composer.fill(text)

    def refresh_status(self) -> None:
        state, at_right = self._state()
        figures = answer_statistics(
            self.session, self.model, self.streaming, cached_tokens=self.cached_tokens
        )
        parts = (StatusPart(self.model, 7, "bold", shortens=True), *state, *figures)
        self.status.show(parts, at_right)
        self.header.update(self.session.conversation.title)

    def _state(self) -> tuple[list[StatusPart], str]:
        if self.streaming is not None:
            rate = self.streaming.tokens_per_s
            text = f"writing {rate:.0f} tok/s" if rate else "writing"
            text = text if self.streaming.tokens else "reading"
            return [StatusPart(text, 10, "$accent")], "Esc stops"
        if self.session.answer_elsewhere is not None:
            return [StatusPart("another program is writing", 10, "$accent")], "F1 help"
        if self.summarising is not None:
            return [StatusPart("summarising…", 10, "$accent")], "Esc stops"
        if self.calling:
            return [StatusPart(self.calling, 10, "$accent", shortens=True)], "Esc stops"
        if self.loader.progress:
            return [StatusPart(self.loader.progress, 10, "$accent")], "F1 help"
        if self.transcript.selection is not None:
            edit = "e edit · " * isinstance(self.transcript.selection, Question)
            return [], f"{edit}c copy · y code · f fork · Esc"
        return [StatusPart(self.loader.start_text, 6, shortens=True)], "F1 help"


def answer_statistics(
    session: ChatSession, model: str, streaming: Streaming | None = None, *, cached_tokens: int = 0
) -> list[StatusPart]:
    """Return the status line's parts about the last answer: context, tokens/s, times, cached tokens.

    Only the context is returned if `model` did not generate the last answer. `streaming` is the answer
    that is being generated, if any: tokens/s are then left out, because `ChatView` shows an estimate.
    `cached_tokens` replaces tokens/s and times until an opened conversation has a new answer.
    """
    stats, engine = session.last_stats(model), session.engine
    if stats is None or (streaming is not None and not streaming.tokens):
        return [StatusPart(f"context {engine.info.n_ctx:,}", 6)] if engine else []
    n_ctx = engine.info.n_ctx if engine else stats.n_ctx
    is_opened = session.answer is None and bool(cached_tokens)
    cached = f"{cached_tokens:,} tokens cached"
    share = 100 * stats.context_tokens // n_ctx if n_ctx else 0
    return [
        StatusPart(f"context {stats.context_tokens:,}/{n_ctx:,}", 8, "$warning" if share >= 80 else ""),
        *([StatusPart(cached, 7)] if is_opened else _of_answer(stats, writing=streaming is not None)),
    ]


def _of_answer(stats: Stats, *, writing: bool) -> list[StatusPart]:
    return [
        StatusPart("" if writing else f"{stats.tokens_per_s:.1f} tok/s", 7),
        StatusPart(f"first {stats.ttft_ms:,.0f} ms", 5),
        StatusPart(f"cached {stats.cached_tokens:,}" if stats.cached_tokens else "", 4),
    ]
