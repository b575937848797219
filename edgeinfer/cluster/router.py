"""Serve's choice of a replica: the one that has read the beginning of the request, else the least busy.

An extension by Ray Serve's own interface (https://docs.ray.io/en/latest/serve/advanced-guides/
custom-request-router.html).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from edgeinfer import beginnings
from edgeinfer.cluster.asking import Asked


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a request where its longest known beginning was sent last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._readers = beginnings.Readers()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Return ranks of replicas: one with the prefix cached, unless its queue is full, then all."""
        if not candidate_replicas:
            return []
        asked = _asked(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_id = {
            replica.replica_id: replica
            for replica in self.select_available_replicas(candidate_replicas)
        }
        known = self._readers.find(asked.beginnings, by_id) if asked else None
        # of equally busy ones Serve takes the first
        anybody = random.sample(candidate_replicas, len(candidate_replicas))
        return [anybody] if known is None else [[by_id[known]], anybody]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Remember who reads this request."""
        asked = _asked(pending_request)
        if asked:
            self._readers.note(asked.beginnings, replica_id)


def _asked(pending: PendingRequest | None) -> Asked | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Asked) else None
