"""Ask questions and show progress on a terminal, and format tables."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from edgeinfer.errors import InterruptedByUser, UsageError
from edgeinfer.platform.process import SignalHandlers
from edgeinfer.safe_text import without_controls

_REDRAWN_EVERY_S = 0.5


def confirm(question: str, *, yes: bool, needs_yes: bool = False) -> None:
    """Ask the user to confirm, unless `yes` is set. Raises InterruptedByUser if the user declines.

    If stdin is not a terminal, the question is not asked: this counts as a yes or, with `needs_yes`,
    raises UsageError.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        if not needs_yes:
            return
        problem = f"cannot ask “{question}”: stdin is not a terminal"
        raise UsageError(problem, hint="add --yes to confirm")
    sys.stderr.write(f"{without_controls(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InterruptedByUser("nothing was removed")


@contextmanager
def stoppable(message: str, hint: str | None = None) -> Iterator[None]:
    """Raise InterruptedByUser with this message if Ctrl-C or SIGTERM arrives during the block."""
    try:
        with SignalHandlers({signal.SIGTERM: signal.default_int_handler}):
            yield
    except KeyboardInterrupt as error:
        raise InterruptedByUser(message, hint=hint) from error


def table(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), gap: str = "  "
) -> str:
    """Return `rows`, the header first, as aligned text. `right`: indices of right-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in sized]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)


class StageProgress:
    """Writes the stages of a task to `out`, one per line; on a terminal, with the elapsed time (s).

    `note` is added to each line. In a `with` block, the line of the current stage is redrawn twice a
    second. `seconds` maps each ended stage to its duration.
    """

    def __init__(self, out: TextIO, *, quiet: bool, note: str = "") -> None:
        self._out, self._quiet = out, quiet
        self._note = f" ({note})" if note else ""
        self._drawn = out.isatty() and not quiet
        self._stage = ""
        self._fraction: float | None = None
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> StageProgress:
        if self._drawn:
            threading.Thread(target=self._keep_drawing, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()
            self._finish()

    def report(self, stage: str, fraction: float | None) -> None:
        """Begin `stage` if it is new; show its progress `fraction`, 0 to 1, or None if unknown."""
        with self._lock:
            self._fraction = fraction
            if stage == self._stage:
                return
            self._finish()
            self._stage, self._began = stage, time.monotonic()
            if self._quiet:
                return
            if self._drawn:
                self._draw()
            else:
                self._out.write(f"{stage} …{self._note}\n")
                self._out.flush()

    def _keep_drawing(self) -> None:
        while not self._closed.wait(_REDRAWN_EVERY_S):
            with self._lock:
                if self._stage and not self._closed.is_set():
                    self._draw()

    def _draw(self) -> None:
        done = "" if self._fraction is None else f" {self._fraction:.0%}"
        elapsed = f" {time.monotonic() - self._began:.0f} s"
        self._out.write(f"\r\x1b[K{self._stage} …{done}{elapsed}{self._note}")
        self._out.flush()

    def _finish(self) -> None:
        self.seconds[self._stage] = time.monotonic() - self._began
        if self._stage and self._drawn:
            self._out.write(f"\r\x1b[K{self._stage} {self.seconds[self._stage]:.1f} s\n")
            self._out.flush()
