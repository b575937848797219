"""Ctrl-C while a program's modules are imported: end without a traceback."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def exit_at_once(_number: int, _frame: object) -> NoReturn:
    """Handle Ctrl-C by ending with status 130: while modules are imported, there is nothing to undo."""
    os._exit(130)


def end_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless something handles or ignores it."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, exit_at_once)


def raise_on_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again after `end_quietly`."""
    if _signal.getsignal(_signal.SIGINT) is exit_at_once:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
