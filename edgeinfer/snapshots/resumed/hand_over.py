"""The app's side of a hand-over from a process that started cold to one that is resumed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from edgeinfer.snapshots.launching.hand_over import LEAVE, OFFER

if TYPE_CHECKING:
    from edgeinfer.snapshots import frames

    Tell = Callable[[Mapping[str, frames.Value], Sequence[int]], None]


class HandOver:
    """What an app says to its launcher and hears from it; `launching.hand_over` has the order."""

    def __init__(
        self, tell: Tell, *, is_successor: bool, predecessor: socket.socket | None = None
    ) -> None:
        self.is_successor = is_successor
        self.predecessor = predecessor
        self._tell = tell
        self._pipe = -1

    def listen(self) -> int:
        """Tell the launcher that this process may be succeeded; a descriptor that `receive` reads."""
        self._pipe, theirs = os.pipe()
        self._tell({"op": "hand-over"}, [theirs])
        os.close(theirs)
        return self._pipe

    def receive(self) -> Literal["offer", "leave", "end"]:
        """Read what the launcher says."""
        word = os.read(self._pipe, 1)
        if word == OFFER:
            return "offer"
        return "leave" if word == LEAVE else "end"

    def idle(self, channel: socket.socket | None = None) -> None:
        """Say that a successor may come now; it gets `channel`."""
        self._tell({"op": "idle"}, () if channel is None else (channel.fileno(),))

    def ready(self) -> None:
        """Say that this process, the successor, could answer."""
        self._tell({"op": "ready"}, ())
