"""The model picker: what there is, what fits, what is here; pulls and warms with progress."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgeinfer.catalog.progress.text import progress_text
from edgeinfer.chat.opening import Launch
from edgeinfer.chat.shelf import Shelved, shelf, size_words
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError, InterruptedByUser
from edgeinfer.tui.bindings import bindings

if TYPE_CHECKING:
    from edgeinfer.catalog.progress.job import PullProgress

_KEYS = "Enter uses or pulls · w warm · x stop · Esc"


class ModelScreen(ModalScreen[str | None]):
    """The answer is the model to use.

    `first`: nothing can answer yet, so the wanted model is offered.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave", show=False),
        *bindings("models"),
    ]

    def __init__(self, launch: Launch, wanted: str, *, first: bool = False) -> None:
        super().__init__()
        self.launch = launch
        self.wanted = wanted
        self.first = first
        self.rows: list[Shelved] = []
        self._stop = threading.Event()
        self._working = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "No model is here yet" if self.first else "Models"
            sheet.border_subtitle = _KEYS
            if self.first:
                yield Static(
                    f"Enter fetches {self.wanted} and starts the chat. Or pick another.",
                    classes="text first",
                    markup=False,
                )
            yield OptionList(id="models")
            yield Static("", classes="detail", markup=False)
            yield Static("", classes="progress", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._read()

    @work(thread=True, group="shelf")
    def _read(self) -> None:
        try:
            rows = shelf(self.launch.host.warm_models())
        except EdgeInferError as error:
            self.app.call_from_thread(self._show_error, error)
            return
        self.app.call_from_thread(self._show, rows)

    def _show(self, rows: list[Shelved]) -> None:
        chosen = self.chosen.name if self.chosen else self.wanted
        if self.first and not self.rows:
            chosen = self._offered(rows) or chosen
        self.rows = rows
        listed = self.query_one(OptionList)
        listed.clear_options()
        room = self.query_one(".sheet").size.width - 8
        listed.add_options(
            Option(_row(r, r.name == self.wanted and not self.first, room), id=r.name) for r in rows
        )
        listed.highlighted = (
            next((i for i, r in enumerate(rows) if r.name == chosen), 0) if rows else None
        )

    def _offered(self, rows: list[Shelved]) -> str:
        """Offer what another program has here, which needs no fetching; "" when none has any."""
        found = [row for row in rows if row.store]
        if not found:
            return ""
        best = next((row for row in found if row.fits is not False), found[0])
        self.query_one(".first", Static).update(
            f"Enter uses {best.name}, which is here from {best.store}, where it is. Or pick another: "
            f"{self.wanted} would be fetched."
        )
        return best.name

    @property
    def chosen(self) -> Shelved | None:
        at = self.query_one(OptionList).highlighted
        return self.rows[at] if at is not None and at < len(self.rows) else None

    @on(OptionList.OptionHighlighted)
    def _detail(self) -> None:
        if self.chosen is not None:
            self.query_one(".detail", Static).update(detail(self.chosen))

    @on(OptionList.OptionSelected)
    def _use_or_pull(self) -> None:
        chosen = self.chosen
        if chosen is None or self._working:
            return
        if chosen.pulled:
            self.dismiss(chosen.name)
        else:
            self._begin(f"pulling {chosen.name}")
            self._pull(chosen.name)

    def action_warm(self) -> None:
        chosen = self.chosen
        if chosen is None or self._working:
            return
        if not chosen.pulled:
            self.notify(f"Pull {chosen.name} first: Enter.", markup=False)
            return
        self._begin(f"warming {chosen.name}")
        self._warm(chosen.name)

    def action_cancel(self) -> None:
        self._stop.set()

    def action_leave(self) -> None:
        self._stop.set()
        self.dismiss(None)

    def _begin(self, words: str) -> None:
        self._stop.clear()
        self._working = words
        self._progress(f"{words}…")

    @work(thread=True, group="pull")
    def _pull(self, name: str) -> None:
        from edgeinfer.catalog.pull import pull  # 30 ms: hashing, and what the network needs

        app = self.app
        try:
            pulled = pull(
                name, lambda p: app.call_from_thread(self._progress, pull_text(p)), self._stop
            )
        except EdgeInferError as error:
            app.call_from_thread(self._ended, error)
        else:
            app.call_from_thread(self._ended, None)
            app.call_from_thread(self.dismiss, pulled.name)

    @work(thread=True, group="pull")
    def _warm(self, name: str) -> None:
        app = self.app

        def progress(stage: str, fraction: float | None) -> None:
            app.call_from_thread(
                self._progress, stage if fraction is None else f"{stage} {fraction:.0%}"
            )

        options = self.launch.options
        if name != self.launch.model:
            options = options.for_another_model()
        try:
            self.launch.host.warm(name, options, progress, self._stop)
        except EdgeInferError as error:
            app.call_from_thread(self._ended, error)
        else:
            app.call_from_thread(self._ended, None)
            app.call_from_thread(
                self.notify, f"{name} is warm: it starts in a tenth of a second.", markup=False
            )
            app.call_from_thread(self._read)

    def _progress(self, words: str) -> None:
        if self.is_mounted:
            line = self.query_one(".progress", Static)
            line.update(words)
            line.display = bool(words)

    def _ended(self, error: EdgeInferError | None) -> None:
        self._working = ""
        if not self.is_mounted:
            return
        self._progress("")
        if isinstance(error, InterruptedByUser):
            self.notify("Stopped. What was fetched is kept.")
        elif error is not None:
            self._show_error(error)

    def _show_error(self, error: EdgeInferError) -> None:
        self.query_one(".detail", Static).update(f"✗ {error.message}\n{hint(error)}".strip())


def _row(row: Shelved, current: bool, room: int) -> Content:
    """Return one line of `room` cells for a model; the licence only where there is room."""
    about = "~" if row.guessed else ""
    size = f"{about}{size_words(row.size_bytes)}" if row.size_bytes else ""
    fits = {True: "fits", False: "too big", None: ""}[row.fits]
    licence = 18 if room >= 80 else 0
    width = max(12, min(36, room - 34 - licence))
    return Content.assemble(
        ("● " if current else "  ", "$accent"),
        f"{_cut(row.name, width):<{width}}",
        f"{row.parameters:>6} {size:>8}  ",
        (f"{_cut(row.licence, licence - 1):<{licence}}" if licence else "", "dim"),
        (f"{fits:<8}", "$error" if row.fits is False else "dim"),
        (row.state, "$success"),
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def detail(row: Shelved) -> str:
    """Return up to three lines about the chosen model."""
    facts = [
        row.title,
        row.purpose,
        f"{row.context_length:,} tokens of context" if row.context_length else "",
        row.licence,
    ]
    lines = [" · ".join(f for f in facts if f)]
    if row.needs_bytes:
        verb = {True: "Fits", False: "Does not fit", None: "Needs"}[row.fits]
        about = "about " if not row.pulled else ""
        free = size_words(row.available_bytes)
        lines.append(f"{verb}: {about}{size_words(row.needs_bytes)} needed, {free} free")
    if not row.pulled:
        lines.append(f"Enter fetches {size_words(row.size_bytes) if row.size_bytes else 'it'}.")
    return "\n".join(line for line in lines if line)


def pull_text(progress: PullProgress) -> str:
    """Return `━━━─────  downloading x.gguf: 41.0 MB of 92.0 MB, 8.2 MB/s, 6 s left`."""
    done = progress.done_bytes
    bar = f"{'━' * (20 * done // progress.total_bytes):─<20}  " if progress.total_bytes else ""
    return f"{bar}{progress_text(progress)}"
