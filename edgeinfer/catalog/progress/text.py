"""The progress of a pull or a quantization in one line, and on stderr: a bar, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edgeinfer.catalog.progress.job import OnProgress, PullProgress, Stage
from edgeinfer.units import format_bytes, format_duration

#: Without a bar, a line this often is enough to tell a slow download from a dead one.
PLAIN_INTERVAL_S = 5.0

STAGES: dict[Stage, str] = {
    "resolving": "looking up",
    "checking": "checking",
    "downloading": "downloading",
    "copying": "copying",
    "verifying": "verifying",
    "converting": "converting",
    "quantizing": "quantizing",
    "weighing": "weighing",
    "scoring": "measuring",
    "reading": "reading",
    "done": "done",
}
_COUNTS: dict[Stage, str] = {"quantizing": "tensors", "weighing": "tokens", "scoring": "tokens"}


def progress_text(now: PullProgress) -> str:
    """Return `downloading x.gguf: 12.0 MB of 98.4 MB, 3.1 MB/s, 28 s left`, or the note of a stage."""
    part = f" ({now.index + 1} of {now.n_files})" if now.n_files > 1 else ""
    text = f"{STAGES[now.stage]} {now.file}{part}".rstrip()
    return ": ".join(t for t in (text, amount_text(now), now.note) if t)


def amount_text(now: PullProgress) -> str:
    """Return `12.0 MB of 98.4 MB, 3.1 MB/s, 28 s left`, as far as it is known."""
    parts: list[str] = []
    counted = _COUNTS.get(now.stage)
    if counted and now.total_bytes:
        parts.append(f"{now.done_bytes} of {now.total_bytes} {counted}")
    elif not counted and now.done_bytes:
        of = f" of {format_bytes(now.total_bytes)}" if now.total_bytes else ""
        parts.append(f"{format_bytes(now.done_bytes)}{of}")
    if now.rate_bytes_per_s and not counted:
        parts.append(f"{format_bytes(now.rate_bytes_per_s)}/s")
    if now.left_s is not None and now.left_s >= 1:
        parts.append(f"{format_duration(now.left_s)} left")
    return ", ".join(parts)


class PlainLines:
    """Writes a line at every new stage, at every note, and every few seconds."""

    def __init__(self, out: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._out = out
        self._interval_s = interval_s
        self._last: PullProgress | None = None
        self._written_at = 0.0

    def report(self, now: PullProgress) -> None:
        last = self._last
        new = last is None or (last.stage, last.file, last.index) != (now.stage, now.file, now.index)
        due = time.monotonic() - self._written_at >= self._interval_s
        if new or due or (now.note and now.note != (last.note if last else "")):
            self._out.write(progress_text(now) + "\n")
            self._out.flush()
            self._written_at = time.monotonic()
        self._last = now


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
