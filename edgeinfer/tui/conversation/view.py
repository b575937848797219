"""What the chat screen shows of a session: its turns, its title, its state in the status line."""

from __future__ import annotations

from textual.widgets import Static

from edgeinfer.chat.history.values import Stats, Turn
from edgeinfer.chat.launch import Launch, started
from edgeinfer.chat.session import Answer, ChatSession
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.interface import Generation
from edgeinfer.tui.conversation.loading import Loader
from edgeinfer.tui.conversation.streaming import Streaming
from edgeinfer.tui.drawing.entry import AnswerEntry, Entry, Question, Remark, Welcome
from edgeinfer.tui.widgets.composer import Composer
from edgeinfer.tui.widgets.status import Part, Status
from edgeinfer.tui.widgets.transcript import Transcript


class View:
    """Shows `session` in the widgets of the chat screen.

    `streaming` is the answer being written and `summarising` the summary, None where there is none;
    `Answering` sets them. `remembered` are tokens that the model has read of what is open.
    """

    def __init__(self, launch: Launch, session: ChatSession, loader: Loader) -> None:
        self.session = session
        self.loader = loader
        self.header = Static("", id="header", markup=False)
        self.transcript = Transcript(id="transcript")
        self.composer = Composer("Ask something", id="composer")
        self.status = Status(id="status")
        self.streaming: Streaming | None = None
        self.summarising: Generation | None = None
        self.remembered = 0
        self._launch = launch

    @property
    def started(self) -> str:
        """How the chat started; the time is known once the model can compute."""
        return started(self._launch.host.start)

    @property
    def model(self) -> str:
        """The conversation's model, or the one the chat was started with."""
        return self.session.conversation.model or self._launch.model

    def show_welcome(self) -> None:
        """Show what an empty conversation shows."""
        self.transcript.show([Welcome(self.model)])
        self.refresh_status()

    def show_session(self) -> None:
        """Show the branch the session is on."""
        entries = [self.entry(turn) for turn in self.session.path]
        if not entries:
            self.show_welcome()
            return
        self.transcript.show(entries)
        self.refresh_status()

    def entry(self, turn: Turn) -> Entry:
        """Return what shows this turn."""
        page = self.session.alternatives(turn.id)
        if turn.role == "user":
            return Question(turn, page)
        if self.streaming is not None and self.streaming.answer.turn.id == turn.id:
            return self.streaming.entry
        return AnswerEntry(turn, page)

    def note_prompt(self, answer: Answer) -> None:
        """Leave what was remembered of its prompt for `edgeinfer ps`."""
        if answer.cache_report is not None:
            self._launch.host.note_prompt(answer.cache_report)

    def add_remark(self, entry: Entry) -> None:
        """Show words of ours, at the tail."""
        if any(isinstance(e, Welcome) for e in self.transcript.entries):
            self.transcript.show([])
        self.transcript.following = True
        self.transcript.add(entry)

    def show_error(self, error: EdgeInferError, put_back: str = "") -> None:
        """Show an error with the next thing to do, and put the input back."""
        self.add_remark(Remark(error.message, "error", hint(error)))
        self._put_back(put_back)

    def show_next_step(self, error: EdgeInferError, put_back: str) -> None:
        """Show what to do after a failed turn, which tells itself what failed; put the input back."""
        if hint(error):
            self.add_remark(Remark("", hint=hint(error)))
        self._put_back(put_back)

    def _put_back(self, text: str) -> None:
        if text and not self.composer.text:
            self.composer.fill(text)

    def refresh_status(self) -> None:
        """Show header and status line from what is now."""
        state, at_right = self._state()
        writing = self.streaming is not None
        parts = (Part(self.model, 7, "bold", shortens=True), *state, *self._numbers(writing))
        self.status.show(parts, at_right)
        self.header.update(self.session.conversation.title)

    def _numbers(self, writing: bool) -> list[Part]:
        return numbers(self.session, writing=writing, remembered=self.remembered)

    def _state(self) -> tuple[list[Part], str]:
        if self.streaming is not None:
            rate = self.streaming.tokens_per_s
            return [
                Part(f"writing {rate:.0f} tok/s" if rate else "writing", 10, "$accent")
            ], "Esc stops"
        if self.summarising is not None:
            return [Part("summarising…", 10, "$accent")], "Esc stops"
        if self.loader.progress:
            return [Part(self.loader.progress, 10, "$accent")], "F1 help"
        if self.transcript.chosen is not None:
            return [], "e edit · c copy · y code · f fork · Esc"
        return [Part(self.started, 6, shortens=True)], "F1 help"


def numbers(session: ChatSession, *, writing: bool, remembered: int = 0) -> list[Part]:
    """Return context, rate, first token and cached tokens of the last answer.

    While one is being `writing`, the rate is left out: it is shown as it grows. Before the first one in
    a conversation that was opened, the tokens `remembered` of it stand for all but the context.
    """
    answers = [t for t in session.path if t.role == "assistant" and t.stats.completion_tokens]
    engine = session.engine
    if not answers:
        return [Part(f"context {engine.info.n_ctx:,}", 6)] if engine else []
    stats = answers[-1].stats
    n_ctx = engine.info.n_ctx if engine else stats.n_ctx
    is_opened = session.answer is None and bool(remembered)
    share = 100 * stats.context_tokens // n_ctx if n_ctx else 0
    return [
        Part(f"context {stats.context_tokens:,}/{n_ctx:,}", 8, "$warning" if share >= 80 else ""),
        *([Part(f"{remembered:,} tokens remembered", 7)] if is_opened else _of_answer(stats, writing)),
    ]


def _of_answer(stats: Stats, writing: bool) -> list[Part]:
    return [
        Part("" if writing else f"{stats.tokens_per_s:.1f} tok/s", 7),
        Part(f"first {stats.ttft_ms:,.0f} ms", 5),
        Part(f"cached {stats.cached_tokens:,}" if stats.cached_tokens else "", 4),
    ]
