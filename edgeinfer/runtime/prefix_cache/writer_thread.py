"""A thread that writes the prefix cache's files in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("edgeinfer.blocks")
#: Most bytes that may wait to be written. A single larger job is accepted.
_MAX_QUEUED_BYTES = 256 << 20


class WriterThread:
    """Runs jobs in order on a separate thread. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def _has_room(self) -> bool:
        return not self._bytes or self._bytes < _MAX_QUEUED_BYTES

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._busy)

    def put(self, job: Callable[[], None], n_bytes: int = 0) -> bool:
        """Queue a job, which needs `n_bytes` of memory until it is done.

        Returns False if too many bytes are waiting. A job without memory is always accepted.
        """
        with self._changed:
            if n_bytes and not self._has_room:
                return False
            self._waiting.append((job, n_bytes))
            self._bytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="edgeinfer-blocks", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until `put` would accept a job; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_room, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every job is done; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Finish the jobs and end the thread, until a new job; return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        with self._changed:
            self._waiting.clear()
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _main(self) -> None:
        this_thread = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._thread is not this_thread)
                if not self._waiting:
                    return
                job, n_bytes = self._waiting.popleft()
                self._busy = True
            try:
                job()
            except Exception as error:  # noqa: BLE001  the main of a thread: later jobs must be written
                _log.warning("a block was not written: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._busy = False
                    self._bytes -= n_bytes
                    self._changed.notify_all()
