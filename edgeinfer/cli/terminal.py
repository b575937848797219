"""Ask before something is deleted, and tell what a stop leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edgeinfer.errors import InterruptedByUser
from edgeinfer.safe_text import without_controls


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; a script, which has none, is not asked. Raises InterruptedByUser on a no."""
    if yes or sys.stdin is None or not sys.stdin.isatty():
        return
    sys.stderr.write(f"{without_controls(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InterruptedByUser("nothing was removed")


@contextmanager
def stoppable(message: str, hint: str | None = None) -> Iterator[None]:
    """Turn Ctrl-C in the block into InterruptedByUser."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedByUser(message, hint=hint) from error
