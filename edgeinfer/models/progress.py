"""Report the progress of long tasks such as pulls, in one line on a terminal, and cancel them."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

import msgspec

from edgeinfer.errors import InterruptedByUser
from edgeinfer.units import format_bytes, format_duration

Stage = Literal[
    "resolving", "checking", "downloading", "copying", "verifying", "converting", "quantizing",
    "scoring", "reading", "done",
]  # fmt: skip

#: Part of an error message if the next pull can continue the interrupted one.
FETCHED_IS_KEPT = "downloaded data is kept"
#: Shortest time (s) between two reports of a stage.
_INTERVAL_S = 0.1
#: Time (s) over which the rate is averaged: short, so that the rate follows a changing connection.
_WINDOW_S = 5.0


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a task: its position in `file`, the `index`-th (from 0) of `n_files`.

    `done_bytes` counts bytes; while quantizing it counts tensors, while scoring tokens. `left_s` is the
    estimated remaining time. None means unknown.
    """

    stage: Stage
    file: str = ""
    index: int = 0
    n_files: int = 1
    done_bytes: int = 0
    total_bytes: int | None = None
    rate_bytes_per_s: float | None = None
    left_s: float | None = None
    note: str = ""


#: Progress callback. It is called by the working thread, at most ten times a second.
OnProgress = Callable[[PullProgress], None]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When to repeat a request: a download fails after `attempts` in a row that fetched nothing.

    `pause_s` is the first pause between attempts; pauses double, up to 30 s. `connect_s` and
    `silence_s` are the time limits of a connection and of a pause in the data.
    """

    attempts: int = 6
    pause_s: float = 1.0
    connect_s: float = 15.0
    silence_s: float = 30.0

    def pause(self, failures: int, asked_s: float) -> float:
        """Return the pause (s) after `failures` in a row; the server asks for `asked_s` (0: none)."""
        return min(30.0, max(asked_s, self.pause_s * 2.0**failures))


class Job:
    """A long task, such as a pull: it reports progress, and a cancellation raises InterruptedByUser."""

    def __init__(
        self,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        self.retry_policy = retry_policy or RetryPolicy()
        self._on_progress = on_progress or (lambda _: None)
        self._cancellable = cancel is not None
        self._cancel = cancel or threading.Event()
        self._now = PullProgress(stage="resolving")
        self._marks: deque[tuple[float, int]] = deque()
        self._reported_at = 0.0

    def begin(
        self,
        stage: Stage,
        file: str = "",
        *,
        done: int = 0,
        total: int | None = None,
        index: int = 0,
        n_files: int = 1,
    ) -> None:
        """Begin a stage, and report that at once.

        `done` and `total` are in bytes (quantizing: tensors, scoring: tokens); a `total` of None is
        unknown. `file` is the `index`-th (from 0) of `n_files`.
        """
        self.check()
        self._now = PullProgress(
            stage=stage, file=file, done_bytes=done, total_bytes=total, index=index, n_files=n_files
        )
        self._marks.clear()
        self._marks.append((time.monotonic(), done))
        self._report()

    def report(self, done: int, total: int | None = None) -> None:
        """Report that `done` of `total` units are done; None leaves the total as it was.

        Raises InterruptedByUser after a cancellation.
        """
        self.check()
        now = time.monotonic()
        whole = self._now.total_bytes if total is None else total
        if now - self._reported_at < _INTERVAL_S and done != whole:
            return
        self._marks.append((now, done))
        while now - self._marks[0][0] > _WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()
        rate = self._rate()
        left_s = (whole - done) / rate if rate and whole is not None else None
        self._now = msgspec.structs.replace(
            self._now, done_bytes=done, total_bytes=whole, rate_bytes_per_s=rate, left_s=left_s, note=""
        )
        self._report()

    def note(self, text: str) -> None:
        """Report a message at once, such as the reason of a retry; the next report removes it."""
        self._now = msgspec.structs.replace(self._now, note=text)
        self._report()

    def check(self) -> None:
        """Raise InterruptedByUser after a cancellation."""
        if self._cancel.is_set():
            hint = "type the same command again to continue"
            raise InterruptedByUser(f"stopped; {FETCHED_IS_KEPT}", hint=hint)

    @contextmanager
    def call_on_cancel(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` from another thread if the task is cancelled during the block."""
        if not self._cancellable:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                if self._cancel.wait(_INTERVAL_S):
                    wake()
                    return

        thread = threading.Thread(target=watch, name="pull-cancel", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`. Raises InterruptedByUser after a cancellation."""
        self._cancel.wait(seconds)
        self.check()

    def _rate(self) -> float | None:
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / (now - began) if now > began and last > first else None

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self._on_progress(self._now)


#: Time (s) between lines of progress without a terminal. They show that a slow download is not dead.
_PLAIN_INTERVAL_S = 5.0
#: Escape sequence that moves to the beginning of the line and clears it.
_CLEAR = "\r\x1b[K"

#: Stages of a pull that progress lines show under another name.
_LABELS: dict[Stage, str] = {"resolving": "looking up", "scoring": "measuring"}
_COUNTS: dict[Stage, str] = {"quantizing": "tensors", "scoring": "tokens"}


def progress_text(now: PullProgress) -> str:
    """Return the line to show: `downloading x.gguf: 12.0 MB of 98.4 MB, 3.1 MB/s, 28 s left`."""
    position = f" ({now.index + 1} of {now.n_files})" if now.n_files > 1 else ""
    text = f"{_LABELS.get(now.stage, now.stage)} {now.file}{position}".rstrip()
    return ": ".join(t for t in (text, amount_text(now), now.note) if t)


def amount_text(now: PullProgress) -> str:
    """Return amount, rate and remaining time, as far as known: `12.0 MB of 98.4 MB, 3.1 MB/s`."""
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


class ProgressLines:
    """Writes the progress as a line for each stage and note, and a line every `interval_s`.

    With `in_place`, for terminals, each report replaces the line of the last one.
    """

    def __init__(
        self, out: TextIO, interval_s: float = _PLAIN_INTERVAL_S, *, in_place: bool = False
    ) -> None:
        self._out = out
        self._interval_s = interval_s
        self._in_place = in_place
        self._last: PullProgress | None = None
        self._written_at = 0.0

    def report(self, now: PullProgress) -> None:
        last, self._last = self._last, now
        new = last is None or (last.stage, last.file, last.index) != (now.stage, now.file, now.index)
        noted = bool(now.note) and now.note != (last.note if last else "")
        due = time.monotonic() - self._written_at >= self._interval_s
        if self._in_place:
            text = progress_text(now)
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"{_CLEAR}{text}\n" if noted else f"{_CLEAR}{text[:width]}")
        elif new or due or noted:
            self._out.write(progress_text(now) + "\n")
            self._written_at = time.monotonic()
        self._out.flush()


@contextmanager
def progress_on(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[OnProgress]:
    """Yield a progress callback that writes to `stream` (default: stderr), or nothing if `quiet`."""
    out = stream or sys.stderr
    if quiet:
        yield lambda _: None
        return
    try:
        yield ProgressLines(out, in_place=out.isatty()).report
    finally:
        if out.isatty():
            out.write(_CLEAR)
            out.flush()
