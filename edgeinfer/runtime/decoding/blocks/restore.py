"""A prefix on its way from the store into a sequence: threads bring its blocks, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from edgeinfer.blocks.format import Block

#: A block is waited for at least so long (seconds) before computing it is thought to be faster.
_PATIENCE_S = 0.05


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks from `start` on, of which the tokens up to `end` are wanted.

    `futures` are the blocks, in order; None stands for one that cannot be used. `cached` tokens had
    been in memory.
    """

    futures: Sequence[Future[Block | None]]
    start: int
    end: int
    done: int = 0
    cached: int = 0
    has_ended_well: bool = False
    waits_since: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether all blocks are back."""
        return self.done == len(self.futures)

    @property
    def is_ready(self) -> bool:
        """Whether the next block has been read."""
        return self.futures[self.done].done()

    def take(self) -> Block | None:
        """The next block, which is ready; None when it cannot be used."""
        block = self.futures[self.done].result()
        self.done += 1
        self.waits_since = time.monotonic()
        return block

    def is_too_slow(self, compute_s: float) -> bool:
        """Whether the next block is not there, and computing it, which takes so many seconds, is faster
        than waiting on.
        """
        if self.is_ready:
            return False  # not the disk was slow, but this thread
        return time.monotonic() - self.waits_since > max(_PATIENCE_S, compute_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for the next block."""
        wait([self.futures[self.done]], timeout_s)

    def cancel(self) -> None:
        """Read no more."""
        for future in self.futures[self.done :]:
            future.cancel()
