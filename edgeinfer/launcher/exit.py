"""How a launch ends: as its app ended. The launcher imports this: cheap standard library only."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from edgeinfer.errors import EdgeInferError

#: Signals after which an app that ended was asked to, and is not started again.
ASKED_TO_END = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
#: The exit code of an exception nobody foresaw (`cli.main`); `serve` survives it like a signal.
UNEXPECTED = 70


def is_ordinary(number: int) -> bool:
    """Whether a signal that ended an app needs no words."""
    return number in (*ASKED_TO_END, _signal.SIGPIPE)


def tell_killed(number: int, why: str) -> None:
    """Say that the app was killed."""
    sys.stderr.write(
        f"\nedgeinfer: the app was killed by signal {number}{f' ({why})' if why else ''}\n"
    )
    sys.stderr.flush()


def fail(error: EdgeInferError) -> NoReturn:
    """End with an error before there is an app."""
    from edgeinfer import error_text  # 1 ms

    sys.stderr.write(error_text.describe_error(error) + "\n")
    sys.stderr.flush()
    os._exit(error_text.exit_code(error))


def die_of(number: int) -> NoReturn:
    """End by this signal, so that whoever waits for us sees what the app died of."""
    _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
