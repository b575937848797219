"""Give the memory of the KV cache back to the OS while the engine is idle."""

from __future__ import annotations

import time

from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.cache import PrefixCache
from edgeinfer.runtime.scheduler.prefixes import Prefixes

#: Idle time (s) after which the KV cache's memory is given back to the OS.
_IDLE_S = 300.0
#: Interval (s) of the checks whether all blocks are on disk.
_WRITE_CHECK_S = 0.5
#: Memory is given back only if idle sequences use at least this many cells.
_MIN_IDLE_CELLS = 512


class IdleCells:
    """Gives the memory of the cells of `kv` back to the OS after five idle minutes.

    It waits until all sequences are in the on-disk prefix cache. llama.cpp does not report which cells
    are free, so all cells are emptied; a pinned prefix is saved before that, and restored afterwards
    (decision 088).
    """

    def __init__(
        self, kv: KvCache, prefixes: Prefixes, states: SequenceStates | None, context: LlamaContext
    ) -> None:
        self._kv, self._prefixes = kv, prefixes
        self._states = states
        self._context = context
        self._ranges: list[Range] = []
        self._used_at = time.monotonic()

    def record_use(self) -> None:
        """Record that the engine is in use; stop giving memory back to the OS."""
        self._used_at = time.monotonic()
        self._ranges.clear()

    def due_in_s(self) -> float | None:
        """Return in how many seconds `release_some` has something to do, None for never."""
        if self._ranges:
            return 0.0
        cache = self._prefixes.prefix_cache
        if not self._context.cells.buffers or cache is None or not self._is_on_disk(cache):
            return None
        least_s = 0.0 if cache.folder.writer.is_idle else _WRITE_CHECK_S
        return max(least_s, self._used_at + _IDLE_S - time.monotonic())

    def _is_on_disk(self, cache: PrefixCache) -> bool:
        if not cache.can_store:
            return False
        idle = [cached_seq for cached_seq in self._kv.cached_sequences if not cached_seq.pinned]
        if cache.saver.has_work or sum(len(c.cells) for c in idle) < _MIN_IDLE_CELLS:
            return False
        return all(not c.in_use and cache.saver.would_store(c) for c in idle)

    def release_some(self) -> None:
        """Drop all sequences in the first call; give 256 MiB of memory back in each later call.

        If a prefix is pinned, the first call gives all memory back at once.
        """
        if self._ranges:
            self._context.cells.release_pages([self._ranges.pop()])
            return
        self._kv.drop_idle()
        pinned = [cached_seq for cached_seq in self._kv.cached_sequences if cached_seq.pinned]
        if pinned:
            self._release_except(pinned)
        else:
            self._ranges = list(self._context.cells.pages())

    def _release_except(self, pinned: list[CachedSequence]) -> None:
        assert self._states is not None
        states = []
        for cached_seq in pinned:
            state = self._states.save(cached_seq.seq_id, 0, len(cached_seq.tokens))
            is_recurrent = not self._kv.supports_truncation
            checkpoint = self._states.save_checkpoint(cached_seq.seq_id) if is_recurrent else None
            states.append((cached_seq, state, checkpoint))
        for cached_seq in pinned:
            self._kv.clear_cells(cached_seq)
        self._context.cells.release_pages()
        for cached_seq, state, checkpoint in states:
            is_restored = state is not None and self._states.restore(cached_seq.seq_id, state)
            if is_restored and checkpoint is not None:
                is_restored = self._states.restore_checkpoint(cached_seq.seq_id, checkpoint)
            if not is_restored:
                self._kv.drop(cached_seq)
