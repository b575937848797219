"""The plain chat: reads and prints lines, without colours or cursor movement.

Screen readers, dumb terminals and pipes need such a chat. Its commands are those of the Textual app.
"""

from __future__ import annotations

import contextlib
import select
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, TextIO, TypeVar

from edgeinfer.chat import attachments, commands, context, model_choices
from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.commander import Commander, other_model_text, sessions_text, stats_text
from edgeinfer.chat.history.store import purge_deleted
from edgeinfer.chat.history.values import Attachment, Turn
from edgeinfer.chat.model_choices import list_choices
from edgeinfer.chat.speculative_prefill import SpeculativePrefill
from edgeinfer.chat.startup import ChatSetup, describe_start
from edgeinfer.config.config_file import save
from edgeinfer.error_text import hint
from edgeinfer.errors import (
    ContextLengthError,
    EdgeInferError,
    InterruptedByUser,
    ModelNotPulledError,
    UsageError,
)
from edgeinfer.models.progress import FETCHED_IS_KEPT, ProgressLines
from edgeinfer.platform.process import SignalHandlers
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Progress
from edgeinfer.safe_text import without_controls
from edgeinfer.tools.approval import Decision
from edgeinfer.tools.tool_use import ToolUse
from edgeinfer.units import format_bytes

if TYPE_CHECKING:
    from edgeinfer.tools.loop import Card

T = TypeVar("T")


class Repl:
    """A chat that reads lines from `source` and writes text to `out`.

    Tool calls that need approval are refused, unless both streams are terminals.
    """

    def __init__(self, setup: ChatSetup, source: TextIO, out: TextIO) -> None:
        self.setup = setup
        self.session = setup.session()
        self.commander = Commander(self.session, self, setup.config, setup.tools)
        self._engines = setup.engines()
        self._source = source
        self._out = out
        self._interactive = source.isatty() and out.isatty()
        self._failure: EdgeInferError | None = None
        self._speculative_prefill = SpeculativePrefill(self.session)
        self._attachments: list[Attachment] = list(setup.attachments)
        self._editing: int | None = None
        self._leaving = False
        self._unfolded = False

    def run(self) -> None:
        """Chat until the input ends or the user leaves.

        Unless both streams are terminals, the first error is raised: an error of loading the model at
        once, any other one at the end of the chat.
        """
        start = describe_start(self.setup.host.start).capitalize()
        self.show_text(f"edgeinfer, plain chat. {start}. /help lists the commands, /quit leaves.")
        try:
            self._begin()
            while not self._leaving:
                line = self._read()
                if line is None:
                    break
                self._take(line)
        finally:
            self._speculative_prefill.stop()
            if self.session.answer is not None and self.session.is_answering:
                self.session.answer.abandon()
            if self.session.tools is not None:
                self.session.tools.close()
            self._engines.close()
            self.session.release_draft()
            purge_deleted(self.setup.open_store)
        if self._failure is not None and not self._interactive:
            raise self._failure

    def _begin(self) -> None:
        if self.setup.continue_last:
            if note := self.session.open_last(self.setup.typed_model):
                self.show_text(note)
            if self.session.conversation.id:
                self.show_changed()
        if self.session.store and self.session.unstored:
            self.show_text(self.session.unstored)
        for attachment in self._attachments:
            self.show_text(f"Attached: {attachment.name}")
        try:
            self.use_model(self.session.conversation.model or self.setup.model)
        except EdgeInferError as error:
            if not self._interactive:
                raise
            self._show_error(error)
        if self.setup.with_tools:
            self._take("/tools on")

    def _read(self) -> str | None:
        """Read a line; None at the end of the input. A final backslash adds the next line."""
        lines: list[str] = []
        looks = self.setup.config.read_ahead
        if looks and self._speculative_prefill.check_input("", self._attachments, self._editing):
            self._speculative_prefill.start()
        while True:
            if not lines:
                self._write("\n")
            try:
                line = self._line("… " if lines else "> ", remembers=True)
            except KeyboardInterrupt:
                self._write("\n")
                return ""
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str, *, remembers: bool = False) -> str | None:
        """Read a line; None at the input's end. `remembers` adds the line to the terminal's history."""
        if self._source is not sys.stdin or not self._interactive:
            self._write(prompt if self._source.isatty() else "")
            line = self._source.readline()
            return line.rstrip("\n") if line else None
        history = self._history
        try:
            line = input(prompt)
        except EOFError:
            self._write("\n")
            return None
        if history is not None and remembers and line.strip():
            history.add_history(line)
        return line

    @cached_property
    def _history(self) -> ModuleType | None:
        """The module `readline`, filled with past questions; None if this Python has no such module."""
        try:
            import readline
        except ImportError:  # the one-file program contains no readline
            return None
        readline.set_auto_history(False)
        for text in reversed(self.session.store.past_questions()):
            if "\n" not in text:
                readline.add_history(text)
        return readline

    def _take(self, line: str) -> None:
        self._speculative_prefill.stop()
        try:
            self._show_other_changes()
            if commands.is_command(line.strip()):
                self.commander.run(line.strip())
            elif line.strip():
                self._ask(line)
        except EdgeInferError as error:
            self._show_error(error)
            if isinstance(error, ContextLengthError):
                ways = "/drop stops sending the oldest turns, /summarise sends a summary instead."
                self.show_text(ways)

    def _show_other_changes(self) -> None:
        """Show the turns that another process has added to the open conversation."""
        shown_ids = {turn.id for turn in self.session.path}
        if self.session.refresh():
            self.show_text("Another window changed the conversation.")
            self._show_turns([turn for turn in self.session.path if turn.id not in shown_ids])

    def _show_turns(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self.show_text(f"{'You' if turn.role == 'user' else 'Answer'}: {turn.content}")

    def _ask(self, text: str) -> None:
        named = map(attachments.read, attachments.mentioned_paths(text))
        attached = [self._count_tokens(a) for a in (*self._attachments, *named)]
        editing, self._editing = self._editing, None
        if editing is None:
            self.session.ask(text, attached)
        else:
            self.session.edit(editing, text, attached)
        self._attachments = []
        for attachment in attached:
            self.show_text(f"With {attachments.describe(attachment)}.")
        if note := attachments.missing_note(text):
            self.show_text(note)
        self._answer()

    def _answer(self) -> None:
        if self.session.engine is None:
            self.use_model(self.session.conversation.model or self.setup.model)
        self.show_answer(self.session.begin_answer())

    def _count_tokens(self, attachment: Attachment) -> Attachment:
        return attachments.count_tokens(attachment, self.session.engine)

    def _show_error(self, error: EdgeInferError) -> None:
        self._failure = self._failure or error
        self.show_text(f"Error: {error.message}")
        if hint(error):
            self.show_text(f"Next: {hint(error)}")

    def _write(self, text: str) -> None:
        self._out.write(without_controls(text))
        self._out.flush()

    def show_text(self, text: str) -> None:
        self._write(f"{text}\n")

    def show_changed(self) -> None:
        self._editing = None
        title = self.session.conversation.title
        self.show_text(f"Conversation: {title}" if title else "A new conversation.")
        self._show_turns(self.session.path)
        if self.session.retries_after_shortening:
            self.show_answer(self.session.regenerate())

    def show_answer(self, answer: AnswerWriter) -> None:
        """Print the answer while it is generated; Ctrl-C stops the generation and keeps the text."""
        self._write("Answer: ")
        thinking = False
        with _ctrl_c_calls(answer.stop):
            try:
                for event in answer.generation:
                    answer.add(event)
                    if isinstance(event, Progress):
                        continue
                    piece = answer.flush()
                    thinking = self._show(piece, thinking)
            except EdgeInferError as error:
                answer.fail(error)
                self._write("\n")
                self._show_error(error)
                return
        self._write("\n")
        if answer.cache_report is not None:
            self.setup.host.note_prompt(answer.cache_report)
        done = answer.done or answer.abandon()
        if done.cut_off_note:
            self.show_text(f"({done.cut_off_note})")
        if answer.store_error is not None:
            self._show_error(answer.store_error)
        if (turn := self.session.calls) is not None:
            self._run_calls(turn)

    def _run_calls(self, turn: Turn) -> None:
        """Run the tool calls of an answer, and let the model continue with the results."""
        tools, run = self.session.tools, self.session.start_calls(turn, self)
        assert tools is not None
        with _ctrl_c_calls(tools.stop):
            calls = run()
        for notice in tools.notices():
            self.show_text(f"Note: {notice}")
        if self.session.note_calls(turn, calls):
            self.show_answer(self.session.begin_answer())

    def wait_for(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        then(work())

    def decide(self, card: Card) -> Decision:
        if not self._interactive:
            self.show_text(card.text())
            return Decision("no", "there is no user to allow it")
        return card.ask(self._ask_user)

    def _ask_user(self, text: str) -> str | None:
        stop = self.session.tools.running if self.session.tools is not None else None
        self.show_text(text)
        self._write("? ")
        with contextlib.suppress(OSError):  # `select` fails for a StringIO, and on Windows
            # wait for input without a read: after the call is stopped, a blocked read would take the
            # next line that the user types
            while not select.select([self._source], [], [], 0.1)[0] and not (stop and stop.is_set):
                pass
        if stop is not None and stop.is_set:
            self._write("\n")
            return None
        line = self._source.readline()
        return line.rstrip("\n") if line else None

    def show_use(self, use: ToolUse, progress: str) -> None:
        name, _, tool = use.name.partition("__")
        if progress:
            self.show_text(f"Tool {name} · {tool}: {progress}")
        else:
            self.show_text(f"Tool {name} · {tool} {use.status}: {_first_line(use.result)}")

    def _show(self, piece: CollectedAnswer, thinking: bool) -> bool:
        if piece.reasoning:
            if not thinking:
                self._write("(thinking…) " if not self._unfolded else "(thinking) ")
            if self._unfolded:
                self._write(piece.reasoning)
            thinking = True
        if piece.text:
            if thinking:
                self._write("\n")
            self._write(piece.text)
            thinking = False
        return thinking

    def answer_edited(self, turn: Turn) -> None:
        self._answer()

    def put_back(self, text: str, editing: int | None = None) -> None:
        self._editing = editing
        self.show_text(f"Your text was: {text}\nType it again.")

    def attach(self, attachment: Attachment) -> None:
        counted = self._count_tokens(attachment)
        self._attachments.append(counted)
        self.show_text(f"Attached {attachments.describe(counted)}.")

    def copy(self, text: str, label: str) -> None:
        self.show_text(text)

    def use_model(self, name: str, n_ctx: int | None = None) -> None:
        name = name or self.session.model
        try:
            self._load(name, n_ctx)
        except ModelNotPulledError as error:
            if not self._interactive:
                raise
            try:
                name = self._fetch(name, error)
            except KeyboardInterrupt as stop:
                raise InterruptedByUser(
                    f"the pull was stopped by Ctrl-C; {FETCHED_IS_KEPT}",
                    hint="`/model NAME` continues the pull",
                ) from stop
            self._load(name, n_ctx)

    def _load(self, name: str, n_ctx: int | None = None) -> None:
        said: list[str] = []

        def progress(stage: str, fraction: float | None) -> None:
            if stage not in said:
                said.append(stage)
                self.show_text(f"{stage}…")

        try:
            engine = self._engines.get(name, n_ctx, progress)
        except KeyboardInterrupt as error:
            if not self._interactive:
                raise
            self.session.use_engine(self._engines.engine, self._engines.model)
            next_step = f"{self._engines.model} stays" if self._engines.engine else "`/model` loads one"
            raise InterruptedByUser(f"the load of {name} was stopped by Ctrl-C; {next_step}") from error
        self.session.use_engine(engine, name)
        if self.session.conversation.model != name:
            self.session.set(model=name)
        self.show_text(f"Model: {name}, context {engine.info.n_ctx:,} tokens.")
        for warning in engine.info.warnings:
            self.show_text(f"Warning: {warning}")

    def follow_model(self) -> None:
        model, loaded = self.session.conversation.model, self.session.loaded_model
        try:
            if model not in ("", loaded):
                self._load(model)
        except EdgeInferError as error:
            if loaded:
                self.show_text(other_model_text(error, loaded))
            else:
                self._show_error(error)

    def _fetch(self, name: str, error: ModelNotPulledError) -> str:
        """Offer to pull a model; return the pulled model's name. Raises `error` if the user refuses."""
        rows = list_choices(self.setup.host.warm_models())
        offered = model_choices.first_run_offer(self.setup, rows)
        report = ProgressLines(self._out).report
        if offered:
            for number, choice in enumerate(offered, 1):
                self.show_text(f"{number}. {choice.model.name}: {model_choices.describe_offer(choice)}")
            reply = self._answer_to(f"No model is here yet. Which one, 1 to {len(offered)}, or n?")
            if not reply.isdecimal() or not 1 <= int(reply) <= len(offered):
                raise error
            name, note = model_choices.pull_first(offered[int(reply) - 1].model.name, report)
            if note:
                self.show_text(note)
            return name
        for row in rows:
            if row.store:
                self.show_text(f"{row.store} has it, and it can be used in place: /model {row.name}")
        if self._answer_to(f"{error.message}. Fetch it now? (y/n)") not in ("y", "yes"):
            raise error
        from edgeinfer.models.pull import pull  # imported here: the import takes 30 ms

        pull(name, report)
        return name

    def _answer_to(self, question: str) -> str:
        return (self._line(f"{question} ") or "").strip().lower()

    def pick_model(self) -> None:
        for row in list_choices(self.setup.host.warm_models()):
            state = f", {row.state}" if row.state else ""
            state += f" from {row.store}" if row.store else ""
            size = f", {format_bytes(row.size_bytes)}" if row.size_bytes else ""
            base = ", base" if row.purpose == "base" else ""
            verdict = f", {row.verdict}" if row.verdict else ""
            short = f" ({row.fit.shortage})" if row.fit and row.fit.shortage else ""
            facts = f"{row.parameters}{size}, {row.licence}{base}{verdict}{short}{state}"
            self.show_text(f"{row.name}: {facts}")
        self.show_text("Choose one: /model NAME")

    def pick_session(self, query: str) -> None:
        self.show_text(sessions_text(self.session, query))

    def show_help(self) -> None:
        self.show_text(commands.help_text())

    def show_stats(self) -> None:
        self.show_text(stats_text(self.session, self._engines.start_text))

    def fold_reasoning(self) -> None:
        self._unfolded = not self._unfolded
        self.show_text("Reasoning is shown." if self._unfolded else "Reasoning is hidden.")

    def use_theme(self, name: str) -> None:
        if not name:
            hint = "`/theme NAME` sets the colours of the Textual app"
            raise UsageError("the plain chat has no colours", hint=hint)
        save(("chat", "theme"), name)
        self.show_text("The Textual app will use this theme.")

    def edit_outside(self) -> None:
        raise UsageError(
            "the plain chat has no editor",
            hint="type the text here; end a line with `\\` to continue on the next line",
        )

    def summarise(self, first_sent: Turn) -> None:
        engine = self.session.idle_engine()
        self.show_text("Summarising…")
        generation = engine.submit(context.summary_request(self.session, engine, first_sent))
        with _ctrl_c_calls(generation.cancel):
            text = context.summary_text(list(generation))
        self.session.drop_turns_before(first_sent.id, text)
        self.show_text(f"Summary: {text}")
        self.show_changed()

    def leave(self) -> None:
        self._leaving = True


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return f"{line[:120]}…" if len(line) > 120 or line != text.strip() else line


def _ctrl_c_calls(stop: Callable[[], object]) -> SignalHandlers:
    return SignalHandlers({signal.SIGINT: lambda *_: stop()})
