"""Bound the processor time that preparing one request takes: template, schema, grammar, tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from edgeinfer.errors import InvalidRequestError

#: Processor seconds; the slowest of 150 published schemas takes less than 2.
PREPARE_S = 10.0

_deadline: ContextVar[float] = ContextVar("edgeinfer_prepare_deadline", default=float("inf"))


@contextmanager
def preparing(seconds: float = PREPARE_S) -> Iterator[None]:
    """Bound what `check_deadline` sees inside by `seconds` of this thread's processor time."""
    token = _deadline.set(min(_deadline.get(), time.thread_time() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline() -> None:
    """Raise InvalidRequestError when the request being prepared has used up its time."""
    if time.thread_time() > _deadline.get():
        raise InvalidRequestError(
            f"preparing the request takes more than {PREPARE_S:.0f} s of processor time",
            hint="send a smaller schema, fewer tools or a shorter prompt",
        )
