"""Store finished responses of `/v1/responses` in memory, so that clients can continue them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from edgeinfer.server.limits import Limits


class StoredResponse(msgspec.Struct, frozen=True):
    """The JSON of a finished response, and the items of its conversation before the answer."""

    reply: bytes
    conversation: tuple[Any, ...]
    size_bytes: int
    stored_at: float = msgspec.field(default_factory=time.monotonic)


class ResponseStore:
    """Stores responses by id and by the API key's name; each key has its own responses.

    `Limits.stored_…` bound their number, bytes and age.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._responses: dict[tuple[str, str], StoredResponse] = {}

    def find(self, key: str, response_id: str) -> StoredResponse | None:
        """Return the response with this id; None if it was never stored, or has been evicted."""
        self._evict()
        return self._responses.get((key, response_id))

    def add(self, key: str, response_id: str, response: StoredResponse) -> None:
        self._responses[key, response_id] = response
        self._evict()

    def remove(self, key: str, response_id: str) -> None:
        """Remove a response. Raises KeyError if it is not stored."""
        del self._responses[key, response_id]

    def _evict(self) -> None:
        """Remove expired responses, then the oldest until the limits per key and of bytes are met."""
        limits, oldest = self._limits, time.monotonic() - self._limits.stored_s
        count: Counter[str] = Counter()
        size_bytes = 0
        for (key, response_id), response in reversed(list(self._responses.items())):
            count[key] += 1
            size_bytes += response.size_bytes
            is_beyond = count[key] > limits.stored_responses or size_bytes > limits.stored_bytes
            if is_beyond or response.stored_at < oldest:
                del self._responses[key, response_id]
