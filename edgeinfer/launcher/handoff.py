"""The launcher's side of a hand-over: an app that started cold is succeeded by a resumed one.

What is said, in this order: the launcher offers a resumed process (`OFFER`), the app says on its link
when it is idle (`{"op": "idle"}`), a successor is resumed and says that it could go on (`"ready"`), and
the first one is told to go (`LEAVE`). Whatever fails before that leaves it where it is. What rides with
`idle` is for the successor alone: a chat's end of a socket between the two.

Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms
import os
import sys
import time

from edgeinfer.errors import EdgeInferError
from edgeinfer.launcher.apps import App, Apps, Verb, quietly

#: What the launcher writes on the pipe of an app that may be succeeded, a byte each.
OFFER, LEAVE = b"o", b"l"
#: Seconds from a successor's start until it could go on; one that takes longer is killed.
LIMIT_S = 60.0
#: How a successor ends that found its predecessor at work again: there is nothing to tell.
_WITHDRAWN = "exit 0"


class Succession:
    """At most one successor at a time, of the app of the verb."""

    def __init__(self, verb: Verb, apps: Apps) -> None:
        self.successor: App | None = None
        self._verb = verb
        self._apps = apps
        self._was_late = False

    def offer(self, main: App | None) -> None:
        """Offer the app a successor, when there is a snapshot now that fits its launch."""
        self._verb.look_again()
        choice = self._verb.choice
        if main is None or main.offers_fd is None or choice.resume == "never":
            return
        try:
            choice.find()
        except (EdgeInferError, OSError):
            return
        quietly(os.write, main.offers_fd, OFFER)

    def start(self, fds: list[int]) -> None:
        """Resume the verb a second time, with the same listening sockets; `fds` are its alone."""
        if self.successor is None:
            self._start(fds)
        for fd in fds:
            os.close(fd)

    def _start(self, fds: list[int]) -> None:
        self._apps.begin_again()
        self._was_late = False
        verb = self._verb
        request = verb.request | {"succeeds": 1, "channels": len(fds)}
        try:
            folder, manifest = verb.choice.find()
            self.successor = self._apps.resume(folder, manifest, request, [*verb.fds, *fds])
        except (EdgeInferError, OSError) as error:
            self.stay(str(error))

    def wait_ms(self) -> int | None:
        """For how long nobody needs to look; None while there is no successor."""
        if self.successor is None:
            return None
        return max(0, int(1000 * (self.successor.began + LIMIT_S - time.monotonic()))) + 1

    def look(self) -> None:
        """Kill a successor whose time is over; its end is told as that of any other."""
        if self.successor is not None and time.monotonic() > self.successor.began + LIMIT_S:
            self._was_late = True
            quietly(os.kill, self.successor.child.pid, _signal.SIGKILL)

    def hand_over(self, first: App | None) -> App | None:
        """Make the successor the verb's app, which is returned; the first one goes with its clients."""
        successor, self.successor = self.successor, None
        if first is not None and first.offers_fd is not None:
            quietly(os.write, first.offers_fd, LEAVE)
        return successor

    def stay(self, why: str, main: App | None = None) -> None:
        """There is no successor: the app goes on as if nothing had been.

        One that withdrew was not wrong, only early: `main` may ask for the next.
        """
        self.successor = None
        if why == _WITHDRAWN:
            self.offer(main)
            return
        if self._was_late:
            why = f"the resumed process could not go on within {LIMIT_S:g} s"
        words = f"no hand-over to the snapshot: {why[:300]}"
        if self._verb.argv[0] == "chat":  # the terminal is the app's
            from edgeinfer.launcher import builds  # only after a failure

            try:  # noqa: SIM105  contextlib costs 3 ms
                builds.log(words)
            except (EdgeInferError, OSError):
                pass
            return
        sys.stderr.write(f"edgeinfer: {words}\n")
        sys.stderr.flush()
