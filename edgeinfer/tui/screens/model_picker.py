"""The model picker lists models, says whether they fit, pulls them, and builds snapshots."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from edgeinfer.chat import model_choices
from edgeinfer.chat.model_choices import ModelChoice, list_choices
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.config.config_file import way_out_of_offline
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError, InterruptedByUser
from edgeinfer.models.fits import is_restricted
from edgeinfer.models.progress import progress_text
from edgeinfer.tui.bindings import bindings
from edgeinfer.tui.screens.dialogs import ListScreen, dialog_frame
from edgeinfer.units import format_bytes

if TYPE_CHECKING:
    from edgeinfer.models.fits import FirstRunChoice
    from edgeinfer.models.progress import PullProgress

_KEYS = "Enter use or pull · ^W warm · ^X stop · Esc"
_KEYS_NARROW = "Enter use or pull · Esc"
_OFFERED = "These suit this machine; Enter fetches one and starts the chat. Type to see others."
_ANY = "Enter starts the chat with the marked model, which is fetched first if it is not here either."
_FILTER = "Type to filter"
#: Minimum width (cells) of a list with all columns; a narrower one shows only names and sizes.
_ROOM_FOR_ALL = 56


class ModelScreen(ListScreen[str | None]):
    """Lists models; returns the name of the chosen one, None after Esc.

    `first`: the chat needs the model `requested`, which is not on this machine. `question`: text that
    the user typed while a model was pulled; the chat puts it into its input field.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("models")]

    def __init__(self, setup: ChatSetup, requested: str, *, first: bool = False) -> None:
        super().__init__()
        self.setup = setup
        self.requested = requested
        self.first = first
        self.question = ""
        self._filter_text = ""
        self.rows: list[ModelChoice] = []
        self.offered: dict[str, FirstRunChoice] = {}
        self._all: list[ModelChoice] = []
        self._stop = threading.Event()
        self._working = ""
        self._pulls = False

    def compose(self) -> ComposeResult:
        with dialog_frame("Models", _KEYS if self.app.size.width >= 60 else _KEYS_NARROW):
            if self.first:
                yield Static("Looking for models…", classes="text first", markup=False)
            yield self.make_field(_FILTER)
            yield OptionList(id="models")
            yield Static("", classes="detail", markup=False)
            yield Static("", classes="progress", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._read()

    @work(thread=True, group="choices")
    def _read(self) -> None:
        try:
            rows = list_choices(self.setup.host.warm_models())
            choices = model_choices.first_run_offer(self.setup, rows) if self.first else []
        except EdgeInferError as error:
            self.app.call_from_thread(self._show_error, error)
            return
        self.app.call_from_thread(self._show, rows, choices)

    def _show(self, rows: list[ModelChoice], choices: list[FirstRunChoice]) -> None:
        self._all = rows
        self.offered = {choice.model.name: choice for choice in choices}
        chosen = self.requested
        if self.first:
            has_some = any(row.pulled for row in rows)
            title = "This model is not here yet" if has_some else "No model is here yet"
            self.query_one(".sheet").border_title = title
            text, chosen = self._offer(rows, choices)
            self.query_one(".first", Static).update(text)
        self._list(self.selection.name if self.selection else chosen)

    @on(Input.Changed)
    def _filter(self) -> None:
        if self._pulls:
            return
        self._list(self.selection.name if self.selection else self.requested)

    def _list(self, chosen: str) -> None:
        filters = self.query_one(Input).value.lower().split()
        by_name = {row.name: row for row in self._all}
        self.rows = [by_name[name] for name in self.offered if name in by_name and not filters] or [
            row
            for row in self._all
            if all(word in f"{row.name} {row.title} {row.purpose}".lower() for word in filters)
        ]
        listed = self.query_one(OptionList)
        listed.clear_options()
        room = self.query_one(".sheet").size.width - 8
        listed.add_options(Option(self._row(row, room), id=row.name) for row in self.rows)
        names = [row.name for row in self.rows]
        chosen_index = names.index(chosen) if chosen in names else 0
        listed.highlighted = chosen_index if names else None

    def _row(self, row: ModelChoice, room: int) -> Content:
        choice = self.offered.get(row.name)
        note = f"{choice.role}, ~{choice.tokens_per_s:.0f} tok/s" if choice else ""
        return _row(row, row.name == self.requested and not self.first, room, note)

    def _offer(self, rows: list[ModelChoice], choices: list[FirstRunChoice]) -> tuple[str, str]:
        """Return a text for a user whose model is not here, and the name of the model to highlight."""
        if way_out := way_out_of_offline(self.setup.host.config):
            ways = f"{way_out}, or import a local file: `edgeinfer pull FILE.gguf`"
            return f"Nothing can be fetched, because offline mode is on: {ways}.", self.requested
        if choices:
            return _OFFERED, choices[0].model.name
        elsewhere = [row for row in rows if row.store]
        if not elsewhere:
            return f"{self.requested} is not here. {_ANY}", self.requested
        best = next((row for row in elsewhere if row.verdict != "too big"), elsewhere[0])
        text = (
            f"Enter uses {best.name}, which is here from {best.store}, where it is. Or pick another: "
            f"{self.requested} would be fetched."
        )
        return text, best.name

    @property
    def selection(self) -> ModelChoice | None:
        index = self.selected_index
        return self.rows[index] if 0 <= index < len(self.rows) else None

    @on(OptionList.OptionHighlighted)
    def _detail(self) -> None:
        if self.selection is not None:
            choice = self.offered.get(self.selection.name)
            about = f"\n{choice.why[0].upper()}{choice.why[1:]}." if choice else ""
            self.query_one(".detail", Static).update(detail(self.selection) + about)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _use_or_pull(self) -> None:
        chosen = self.selection
        if chosen is None or self._working:
            return
        if chosen.pulled:
            self.dismiss(chosen.name)
        else:
            self._begin(f"pulling {chosen.name}")
            self._take_question()
            self._pull(chosen.name)

    def _take_question(self) -> None:
        """Let the user type a question during a pull."""
        self._pulls = True
        field = self.query_one(Input)
        self._filter_text, field.value = field.value, ""
        field.placeholder = "Type a question meanwhile"

    def _keep_question(self) -> None:
        field = self.query_one(Input)
        self.question += field.value
        field.value, field.placeholder = self._filter_text, _FILTER
        self._pulls = False

    def action_warm(self) -> None:
        chosen = self.selection
        if chosen is None or self._working:
            return
        if not chosen.pulled:
            self.notify(f"Pull {chosen.name} first: Enter.")
            return
        self._begin(f"warming {chosen.name}")
        self._warm(chosen.name)

    def action_cancel(self) -> None:
        self._stop.set()

    def action_leave(self) -> None:
        self._stop.set()
        if self._pulls:
            self._keep_question()
        self.dismiss(None)

    def _begin(self, activity: str) -> None:
        self._stop.clear()
        self._working = activity
        self._progress(f"{activity}…")

    @work(thread=True, group="pull")
    def _pull(self, name: str) -> None:
        from edgeinfer.models.pull import pull  # imported here: the import takes 30 ms

        app = self.app

        def report(progress: PullProgress) -> None:
            app.call_from_thread(self._progress, pull_text(progress))

        note = ""
        try:
            if self.offered:
                name, note = model_choices.pull_first(name, report, self._stop)
            else:
                name = pull(name, report, self._stop).name
        except EdgeInferError as error:
            app.call_from_thread(self._finish, error)
            return
        if note:
            app.call_from_thread(self.notify, note)
        app.call_from_thread(self._use, name)

    def _use(self, name: str) -> None:
        self._finish(None)
        self.dismiss(name)

    @work(thread=True, group="pull")
    def _warm(self, name: str) -> None:
        app = self.app

        def progress(stage: str, fraction: float | None) -> None:
            share = "" if fraction is None else f" {fraction:.0%}"
            app.call_from_thread(self._progress, f"{stage}{share}")

        options = self.setup.options
        if name != self.setup.model:
            options = options.for_another_model()
        try:
            self.setup.host.warm(name, options, progress, self._stop)
        except EdgeInferError as error:
            app.call_from_thread(self._finish, error)
        else:
            app.call_from_thread(self._finish, None)
            note = f"{name} is warm: it starts in a tenth of a second."
            app.call_from_thread(self.notify, note)
            app.call_from_thread(self._read)

    def _progress(self, text: str) -> None:
        if self.is_mounted:
            line = self.query_one(".progress", Static)
            line.update(text)
            line.display = bool(text)

    def _finish(self, error: EdgeInferError | None) -> None:
        self._working = ""
        if not self.is_mounted:
            return
        self._progress("")
        if self._pulls:
            self._keep_question()
        if isinstance(error, InterruptedByUser):
            self.notify("Stopped. Downloaded data is kept.")
        elif error is not None:
            self._show_error(error)

    def _show_error(self, error: EdgeInferError) -> None:
        self.query_one(".detail", Static).update(f"✗ {error.message}\n{hint(error)}".strip())


def _row(row: ModelChoice, current: bool, room: int, note: str = "") -> Content:
    """Return a model's line of `room` cells. `note`, if not empty, replaces verdict and state."""
    about = "~" if row.size_is_estimate else ""
    size = f"{about}{format_bytes(row.size_bytes)}" if row.size_bytes else ""
    name = f"{row.name} (base)" if row.purpose == "base" else row.name
    too_big = "$error" if row.verdict == "too big" else ""
    if room < _ROOM_FOR_ALL:
        width = room - len(size) - 3
        text = f"{_cut(name, width):<{width}} "
        return Content.assemble(("● " if current else "  ", "$accent"), text, (size, too_big))
    licence = 18 if room >= 80 else 0
    width = max(12, min(36, room - 34 - licence))
    return Content.assemble(
        ("● " if current else "  ", "$accent"),
        f"{_cut(name, width):<{width}}",
        f"{row.parameters:>6} {size:>8}  ",
        (f"{_cut(row.licence, licence - 1):<{licence}}" if licence else "", "dim"),
        (f"{row.verdict:<8}" if not note else "", too_big or "dim"),
        (note or row.state, "$success"),
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def detail(row: ModelChoice) -> str:
    """Describe a model in up to four lines."""
    facts = [
        f"from {row.store}, used in place" if row.store else row.title,
        row.purpose,
        f"{row.context_length:,} tokens of context" if row.context_length else "",
        f"{row.licence}: not an open-source licence" if is_restricted(row.licence) else row.licence,
    ]
    lines = [" · ".join(f for f in facts if f)]
    if row.fit is not None:
        memory = f"about {format_bytes(row.fit.needed_bytes)} of memory"
        speed = f"an estimated {row.fit.tokens_per_s:.1f} tokens/s"
        is_larger = row.verdict == "too big"
        lines.append(
            f"Larger than memory: {row.fit.why}, {speed}" if is_larger else f"Fits: {memory}, {speed}"
        )
        if row.fit.shortage:
            lines.append(f"Short at the moment: {row.fit.shortage}")
    if not row.pulled:
        lines.append(f"Enter fetches {format_bytes(row.size_bytes) if row.size_bytes else 'it'}.")
    return "\n".join(line for line in lines if line)


def pull_text(progress: PullProgress) -> str:
    """Return a bar and a text: `━━──  downloading x.gguf: 41.0 MB of 92.0 MB, 8.2 MB/s, 6 s left`."""
    done = progress.done_bytes
    bar = f"{'━' * (20 * done // progress.total_bytes):─<20}  " if progress.total_bytes else ""
    return f"{bar}{progress_text(progress)}"
