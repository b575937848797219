"""Gives the memory of the KV cache back when nobody has asked for a while.

What was in the cells is in the store of computed blocks then, and comes back from there. llama.cpp does
not say which cells are free, so all are emptied; a pinned prefix is put back (decision 088).
"""

from __future__ import annotations

import time

from edgeinfer.runtime.kv_cache.cache import KvCache, Resident
from edgeinfer.runtime.llama.context import ActiveContext
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.lookup import BlockCache
from edgeinfer.runtime.scheduler.prefixes import Prefixes

#: Seconds without a request, after which cells are emptied.
_IDLE_S = 300.0
#: The disk is waited for in pieces of this length (seconds).
_WRITING_S = 0.5
#: Fewer tokens are left where they are.
_WORTH_TOKENS = 512


class IdleCells:
    """Empties `kv`, the active context's cells. `states` are those of its sequences. One thread."""

    def __init__(
        self,
        kv: KvCache,
        prefixes: Prefixes,
        states: SequenceStates | None,
        active: ActiveContext,
        *,
        can_cut: bool,
    ) -> None:
        self._kv, self._prefixes = kv, prefixes
        self._states = states
        self._active = active
        self._left: list[Range] = []
        self._used_at = time.monotonic()
        self._can_cut = can_cut

    def note_use(self) -> None:
        """A step is about to use cells: no more of them is given back now."""
        self._used_at = time.monotonic()
        self._left.clear()

    def due_in_s(self) -> float | None:
        """Seconds until there is something to do; None while there is nothing."""
        if self._left:
            return 0.0
        blocks = self._prefixes.blocks
        if not self._active.cells.buffers or blocks is None or not self._can_come_back(blocks):
            return None
        least_s = 0.0 if blocks.blocks.writer.is_idle else _WRITING_S
        return max(least_s, self._used_at + _IDLE_S - time.monotonic())

    def _can_come_back(self, blocks: BlockCache) -> bool:
        if not blocks.keeps:
            return False
        idle = [resident for resident in self._kv.residents if not resident.pinned]
        if blocks.writing.has_work or sum(len(r.cells) for r in idle) < _WORTH_TOKENS:
            return False
        return all(not r.active and blocks.writing.takes(r) for r in idle)

    def work(self) -> None:
        """Give a piece of the memory back, the cells emptied first. Only while idle."""
        if self._left:
            self._active.cells.give_back([self._left.pop()])
            return
        self._kv.drop_idle()
        pinned = [resident for resident in self._kv.residents if resident.pinned]
        if pinned:
            self._give_back_around(pinned)
        else:
            self._left = list(self._active.cells.pages())

    def _give_back_around(self, pinned: list[Resident]) -> None:
        assert self._states is not None
        kept = []
        for resident in pinned:
            state = self._states.read(resident.seq_id, 0, len(resident.tokens))
            point = None if self._can_cut else self._states.read_point(resident.seq_id)
            kept.append((resident, state, point))
        for resident in pinned:
            self._kv.clear_cells(resident)
        self._active.cells.give_back()
        for resident, state, point in kept:
            is_back = state is not None and self._states.write(resident.seq_id, state)
            if is_back and point is not None:
                is_back = self._states.write_point(resident.seq_id, point)
            if not is_back:
                self._kv.drop(resident)
