"""Delete for good what was deleted a day ago: the conversations, and the KV blocks kept of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from edgeinfer.blocks.forget import forget_conversation
from edgeinfer.chat.history.store import Store, store_path
from edgeinfer.errors import EdgeInferError
from edgeinfer.system import paths


def purge_deleted(open_store: Callable[[], Store] | None = None) -> None:
    """Purge what can no longer be undone. What fails is left to the next purge.

    Blocks go first: a purge that is killed midway finds its conversations again.
    """
    if open_store is None and not store_path().exists():
        return
    with (
        contextlib.suppress(EdgeInferError, OSError),
        contextlib.closing((open_store or Store.open)()) as store,
    ):
        overdue = store.overdue()
        for conversation in overdue:
            forget_conversation(paths.blocks_dir(), conversation.owner)
        store.purge(overdue)
