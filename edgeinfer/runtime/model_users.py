"""Which threads use a model's memory outside the decode thread, so that `close` can wait for them."""

from __future__ import annotations

import threading

from edgeinfer.errors import EngineClosedError


class ModelUsers:
    """The threads that use a model: each in a `with` block, which a thread must not nest.

    A block raises EngineClosedError at its start once `refuse` was called.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: set[int] = set()
        self.refused = False

    def __enter__(self) -> None:
        with self._changed:
            if self.refused:
                raise EngineClosedError("the engine is closed")
            self._threads.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._threads.discard(threading.get_ident())
            self._changed.notify_all()

    def refuse(self) -> bool:
        """Refuse all later blocks; return False if they were refused before.

        The calling thread counts as no user: Ctrl-C may have interrupted the end of its block.
        """
        with self._changed:
            was_refused, self.refused = self.refused, True
            self._threads.discard(threading.get_ident())
        return not was_refused

    def wait(self) -> None:
        """Wait until no thread uses the model."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)
