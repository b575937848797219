"""A thread for what nobody waits for: it gives way to every other on the processor."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: As niceness: a tenth of what others get where there is not enough for all.
_NICE = 10


class Background:
    """Runs work in a thread of low priority, which begins with the first.

    llama.cpp's threads begin in the one that computes (OpenMP has a team for each), and have its
    priority. To lower that of the decode thread would be for good: only root may raise it again.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, wait for it, and return what it returns."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "edgeinfer-background", initializer=_be_nice)
        return self._thread.submit(work).result()

    def end(self) -> None:
        """End the thread. The next work begins another."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _be_nice() -> None:
    if sys.platform == "linux":  # elsewhere niceness is a process's
        thread = threading.get_native_id()
        nice = max(os.getpriority(os.PRIO_PROCESS, thread), _NICE)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
