"""Remembers whether a model's blocks come back as they were, and finds it out where nobody knows."""

from __future__ import annotations

from edgeinfer.blocks.store import ModelBlocks
from edgeinfer.runtime.decoding.blocks.block_check import BlockCheck


class Proof:
    """What the check of a model found: "" before it has ended, "exact", or what is wrong."""

    def __init__(self, blocks: ModelBlocks, check: BlockCheck) -> None:
        self._blocks, self._check = blocks, check
        self.found = blocks.read_check()

    @property
    def n_tokens(self) -> int:
        """How many tokens the check computes."""
        return self._check.n_tokens

    @property
    def is_refused(self) -> bool:
        """Whether the check found that this model's blocks do not come back as they were."""
        return self.found not in ("", "exact")

    def go_on(self) -> None:
        """Check a little further. What was written before is deleted where the check ends badly."""
        found = self._check.step()
        if found is None:
            return
        self.found = found
        self._blocks.note_check(found)
        if self.is_refused:
            self._blocks.clear()
