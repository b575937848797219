"""The computed blocks of an engine: another set for each place it computes in."""

from __future__ import annotations

import threading

from edgeinfer.blocks.store import BlockStore
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.blocks.block_cache import BlockCache
from edgeinfer.runtime.decoding.blocks.block_opening import open_blocks
from edgeinfer.runtime.decoding.scheduling.scheduler import Scheduler
from edgeinfer.runtime.loading.load import Loaded
from edgeinfer.runtime.options import LoadOptions, ModelFiles

#: The end of an engine waits so long (seconds) for what was computed to be on the disk.
FLUSH_S = 30.0


class EngineBlocks:
    """Opens and closes the blocks of what `scheduler` decodes with."""

    def __init__(
        self, files: ModelFiles, options: LoadOptions, active: ActiveContext, scheduler: Scheduler
    ) -> None:
        self._files, self._options = files, options
        self._active = active
        self._prefixes, self._roster = scheduler.prefixes, scheduler.roster
        self._kv = scheduler.kv
        self._store: BlockStore | None = None
        self._left: list[threading.Thread] = []

    @property
    def cache(self) -> BlockCache | None:
        """What is open."""
        return self._prefixes.blocks

    def open(self, store: BlockStore, loaded: Loaded, checked: str) -> None:
        """Use `store`. `checked` is what the check of this model has found. Raises OSError."""
        self._store = store
        self._prefixes.blocks = open_blocks(
            store, self._files, self._options, loaded, self._active, self._kv, checked
        )

    def leave(self) -> None:
        """Use no blocks until `enter`. Between two steps; what is written goes on being written."""
        blocks = self._prefixes.leave_store(self._roster.running)
        if blocks is not None:
            thread = threading.Thread(target=blocks.blocks.close, args=(FLUSH_S,), daemon=True)
            thread.start()
            self._left.append(thread)

    def enter(self, loaded: Loaded) -> None:
        """Use the blocks of what `loaded` computes, where a store is used at all. Between two steps."""
        if self._store is not None:
            self.open(self._store, loaded, "")

    def close(self) -> None:
        """Write what waits, and use no store any more."""
        blocks, self._prefixes.blocks = self.cache, None
        self._store = None
        if blocks is not None:
            blocks.close(FLUSH_S)
        while self._left:
            self._left.pop().join(FLUSH_S)
