"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere. Talk, never data."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edgeinfer.catalog.progress import OnProgress, PullProgress
from edgeinfer.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress

#: Without a terminal, a line this often is enough to tell a slow download from a dead one.
PLAIN_INTERVAL_S = 5.0
_VERBS = {
    "resolving": "looking up",
    "checking": "checking",
    "downloading": "downloading",
    "copying": "copying",
    "verifying": "verifying",
    "quantizing": "quantizing",
    "scoring": "measuring",
    "done": "done",
}
_COUNTS = {"quantizing": "tensors", "scoring": "tokens"}


@contextmanager
def progress_on(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[OnProgress]:
    """A reporter for the block: rich's bar when `stream` (stderr) is a terminal, plain lines
    otherwise.
    """
    out = stream or sys.stderr
    if quiet:
        yield lambda _: None
    elif out.isatty():
        with _bar(out) as report:
            yield report
    else:
        yield PlainLines(out).report


def line(now: PullProgress) -> str:
    """`downloading x.gguf: 12.0 MB of 98.4 MB, 3.1 MB/s, 28 s left`."""
    counted = _COUNTS.get(now.stage)
    part = f" ({now.index + 1} of {now.n_files})" if now.n_files > 1 else ""
    text = f"{_VERBS[now.stage]} {now.file}{part}"
    if counted and now.total_bytes:
        text += f": {now.done_bytes} of {now.total_bytes} {counted}"
    elif not counted and now.done_bytes:
        of = f" of {format_bytes(now.total_bytes)}" if now.total_bytes else ""
        text += f": {format_bytes(now.done_bytes)}{of}"
    if now.rate_bytes_per_s and not counted:
        text += f", {format_bytes(now.rate_bytes_per_s)}/s"
    if now.left_s is not None and now.left_s >= 1:
        text += f", {format_duration(now.left_s)} left"
    return f"{text}: {now.note}" if now.note else text


class PlainLines:
    """A line at every new stage, at every note, and every few seconds."""

    def __init__(self, out: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._out = out
        self._interval_s = interval_s
        self._last: PullProgress | None = None
        self._said_at = 0.0

    def report(self, now: PullProgress) -> None:
        last = self._last
        new = last is None or (last.stage, last.file, last.index) != (now.stage, now.file, now.index)
        due = time.monotonic() - self._said_at >= self._interval_s
        if new or due or (now.note and now.note != (last.note if last else "")):
            self._out.write(line(now) + "\n")
            self._out.flush()
            self._said_at = time.monotonic()
        self._last = now


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
    """One bar at a time: the stage that runs."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=None, verb="", amount="")
        self._stage: tuple[str, str, int] | None = None

    def report(self, now: PullProgress) -> None:
        if now.note:
            self._bars.console.print(line(now), highlight=False, markup=False)
        stage = (now.stage, now.file, now.index)
        if stage != self._stage:
            self._stage = stage
            self._bars.reset(self._task, total=now.total_bytes)
        amount = line(now).partition(": ")[2] if not now.note else ""
        self._bars.update(
            self._task,
            completed=now.done_bytes,
            total=now.total_bytes,
            description=now.file.rsplit("/", 1)[-1],
            verb=_VERBS[now.stage],
            amount=amount,
        )
