"""The priority of a thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

#: A tenth of another thread's share on a busy processor.
_NICE = 10


def lower_thread_priority() -> None:
    """Lower this thread's priority on Linux; other systems have niceness per process only."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = max(os.getpriority(os.PRIO_PROCESS, thread), _NICE)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
