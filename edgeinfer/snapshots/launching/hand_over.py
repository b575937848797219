"""The launcher's side of a hand-over: an app that started cold is succeeded by a resumed one.

What is said, in this order: the launcher offers a resumed process (`OFFER`), the app says on its link
when it is idle (`{"op": "idle"}`), a successor is resumed and says that it could go on (`"ready"`), and
the first one is told to go (`LEAVE`). Whatever fails before that leaves it where it is.

Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import os
import sys

from edgeinfer.errors import EdgeInferError
from edgeinfer.snapshots.launching.apps import App, Apps, Verb, quietly

#: What the launcher writes on the pipe of an app that may be succeeded, a byte each.
OFFER, LEAVE = b"o", b"l"


class Succession:
    """At most one successor at a time, of the app of the verb."""

    def __init__(self, verb: Verb, apps: Apps) -> None:
        self.successor: App | None = None
        self._verb = verb
        self._apps = apps

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

    def start(self) -> None:
        """Resume the verb a second time, with the same listening sockets."""
        if self.successor is not None:
            return
        self._apps.begin_again()
        verb = self._verb
        try:
            folder, manifest = verb.choice.find()
            self.successor = self._apps.resume(
                folder, manifest, verb.request | {"succeeds": 1}, verb.fds
            )
        except (EdgeInferError, OSError) as error:
            self.stay(str(error))

    def hand_over(self, first: App | None) -> App | None:
        """Make the successor the verb's app, which is returned; the first one goes with its clients."""
        successor, self.successor = self.successor, None
        if first is not None and first.offers_fd is not None:
            quietly(os.write, first.offers_fd, LEAVE)
        return successor

    def stay(self, why: str) -> None:
        """There is no successor: the app goes on as if nothing had been."""
        self.successor = None
        sys.stderr.write(f"edgeinfer: no hand-over to the snapshot: {why[:300]}\n")
        sys.stderr.flush()
