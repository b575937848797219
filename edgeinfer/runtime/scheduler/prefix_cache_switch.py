"""Open and close the on-disk prefix cache of an engine, which may change its context."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.cache import PrefixCache
from edgeinfer.runtime.scheduler.engine_core import EngineCore
from edgeinfer.runtime.scheduler.sequence import Sequence

#: How long (s) a closing engine waits for pending writes.
FLUSH_S = 30.0


class PrefixCacheSwitch:
    """Opens and closes the on-disk prefix cache that `core` uses.

    States computed on the CPU and on a GPU differ, so each has its own prefix cache in the same store.
    """

    def __init__(
        self, files: ModelFiles, options: LoadOptions, context: LlamaContext, core: EngineCore
    ) -> None:
        self._files, self._options = files, options
        self._context, self._kv = context, core.kv
        self._prefixes, self._queue = core.prefixes, core.queue
        self._store: BlockStore | None = None
        self._closing_threads: list[threading.Thread] = []

    @property
    def cache(self) -> PrefixCache | None:
        return self._prefixes.prefix_cache

    def open(self, store: BlockStore, loaded: LlamaModel, check_outcome: str) -> None:
        """Use `store` for `loaded`; `check_outcome` is of the round-trip check. Raises OSError."""
        self._store = store
        self._prefixes.prefix_cache = PrefixCache(
            store, self._files, self._options, loaded, self._context, self._kv, check_outcome
        )

    def detach(self) -> None:
        """Stop using the prefix cache until `attach`; pending writes continue. Between two steps."""
        self._close_folder(self._queue.running)

    def _close_folder(self, running: Iterable[Sequence]) -> None:
        cache = self._prefixes.detach_prefix_cache(running)
        if cache is not None:
            thread = threading.Thread(target=cache.folder.close, args=(FLUSH_S,), daemon=True)
            thread.start()
            self._closing_threads.append(thread)

    def attach(self, loaded: LlamaModel) -> None:
        """Use the store again, now for `loaded`; do nothing without a store. Between two steps."""
        if self._store is not None:
            self.open(self._store, loaded, "")

    def close(self) -> None:
        """Write pending blocks, and stop using the store."""
        self._store = None
        self._close_folder(())
        while self._closing_threads:
            self._closing_threads.pop().join()
