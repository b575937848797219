"""The launcher's side of a hand-over: it hears builds end, and speaks to the app that started cold.

What is said, in this order: the launcher offers a resumed process (`OFFER`), the app says on its link
when it is idle (`{"op": "idle"}`), a successor is resumed and says that it could go on (`"ready"`), and
the first one is told to go (`LEAVE`). Whatever fails before that leaves it where it is.

Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import os
import select

from edgeinfer.snapshots.launching import surroundings

#: What the launcher writes on the pipe of an app that may be succeeded, a byte each.
OFFER, LEAVE = b"o", b"l"


class Builds:
    """The background builds that this launcher has started. They outlive it."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}

    def start(self, model: bytes, options: bytes) -> None:
        """Start one; `poll` reports its end."""
        module = "edgeinfer.snapshots.building.background_build"
        pid = surroundings.detach(module, os.fsdecode(model), os.fsdecode(options))
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3: its end goes unheard
            return
        self._pids[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def has_ended(self, fd: int) -> bool:
        """Whether `fd` reported the end of a build, which is then forgotten."""
        pid = self._pids.pop(fd, 0)
        if not pid:
            return False
        self._poll.unregister(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        return True
