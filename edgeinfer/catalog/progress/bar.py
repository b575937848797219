"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere. Talk, never data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edgeinfer.catalog.progress.job import OnProgress, PullProgress
from edgeinfer.catalog.progress.text import STAGES, PlainLines, amount_text, progress_text

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def progress_on(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[OnProgress]:
    """Yield a reporter: rich's bar when `stream` (stderr) is a terminal, plain lines otherwise."""
    out = stream or sys.stderr
    if quiet:
        yield lambda _: None
    elif out.isatty():
        with _bar(out) as report:
            yield report
    else:
        yield PlainLines(out).report


@contextmanager
def _bar(out: TextIO) -> Iterator[OnProgress]:
    from rich.console import Console  # 60–90 ms, only on a terminal
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[verb]} {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
    )
    with Progress(*columns, console=Console(file=out), transient=True) as bars:
        yield _Bars(bars).report


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=None, verb="", amount="")
        self._stage: tuple[str, str, int] | None = None

    def report(self, now: PullProgress) -> None:
        if now.note:
            self._bars.console.print(progress_text(now), highlight=False, markup=False)
        stage = (now.stage, now.file, now.index)
        if stage != self._stage:
            self._stage = stage
            self._bars.reset(self._task, total=now.total_bytes)
        amount = amount_text(now) if not now.note else ""
        self._bars.update(
            self._task,
            completed=now.done_bytes,
            total=now.total_bytes,
            description=now.file.rsplit("/", 1)[-1],
            verb=STAGES[now.stage],
            amount=amount,
        )
