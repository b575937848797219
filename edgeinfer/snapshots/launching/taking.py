"""Snapshots that are taken of this launch while it runs: on SIGUSR1, for its endpoint, on a schedule.

Each is `edgeinfer snapshots take` in a process outside the app's namespaces, which dies with this one.
Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import os
import time

from edgeinfer.snapshots import frames
from edgeinfer.snapshots.launching.warming import Warming
from edgeinfer.system import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Taking:
    """The takes that this launcher starts, and at most one schedule."""

    def __init__(self, warming: Warming) -> None:
        self._warming = warming
        self._every_s = 0.0
        self._words: list[str] = []
        self._due = 0.0
        self._scheduled = 0

    def start(self, words: Sequence[str] = (), fds: Sequence[int] = ()) -> int:
        """Start one; its pid. Its answer in JSON goes to the first of `fds`, which are closed."""

        def prepare() -> None:
            process.die_with_parent()
            os.setsid()
            process.silence()
            if fds:
                os.dup2(fds[0], 1)

        own = ("snapshots", "take", str(os.getpid()), "--json", "--quiet", "--logged")
        pid = process.fork_and_exec(process.child_command("edgeinfer", *own, *words), prepare)
        for fd in fds:
            os.close(fd)
        self._warming.watch(pid)
        return pid

    def asked(self, fields: dict[str, bytes], fds: list[int]) -> None:
        """Take one now, where the app gave `fds` for the answer, else keep a schedule."""
        words = frames.split(fields["words"])
        if fds:
            self.start(words, fds)
            return
        self._words = words
        self._every_s = float(fields["every_s"])
        self._due = time.monotonic() + self._every_s

    def wait_ms(self) -> int | None:
        """For how long nobody needs to look; None while there is no schedule."""
        return max(0, int((self._due - time.monotonic()) * 1000) + 1) if self._every_s else None

    def look(self) -> None:
        """Take the one that is due, unless the last one is still being built."""
        now = time.monotonic()
        if not self._every_s or now < self._due:
            return
        self._due = now + self._every_s
        if not self._warming.is_running(self._scheduled):
            self._scheduled = self.start(self._words)
