"""Hashes of a prompt's prefixes, and a map from them to the replica that has prefilled them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

#: Characters that each hash covers beyond the previous one: about as many as 256 tokens, a KV block.
_STRIDE = 1024
#: Maximum number of hashes of a prompt. Together, they cover its first 256 * 1,024 characters.
_MAX_HASHES = 256
#: Maximum number of hashes of which the replica is remembered (about 30 MB).
_MAX_ENTRIES = 200_000


class PrefixAffinity:
    """Maps each hash of a prompt prefix to the replica that prefilled that prefix last.

    If the map is full, the entries that were recorded longest ago are dropped.
    """

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._replica: OrderedDict[int, Any] = OrderedDict()

    def find(self, hashes: Sequence[int], replicas: Any) -> Any:
        """Return the member of `replicas` that prefilled the longest prefix; None if none did.

        `hashes` are those of one prompt, as `prefix_hashes` returns them.
        """
        for prefix in reversed(hashes):
            replica = self._replica.get(prefix)
            if replica is not None and replica in replicas:
                return replica
        return None

    def note(self, hashes: Sequence[int], replica: Any) -> None:
        """Record that `replica` prefills the prefixes with these hashes."""
        for prefix in hashes:
            self._replica[prefix] = replica
            self._replica.move_to_end(prefix)
        while len(self._replica) > self._max_entries:
            self._replica.popitem(last=False)


def prefix_hashes(*parts: object) -> tuple[int, ...]:
    """Return the hashes of a prompt's first 1,024 characters, its first 2,048 and so on.

    `parts` are texts, or lists and dicts of texts at any depth, in the order of the prompt. Each hash
    is 64 bits of BLAKE2b. If two prompts have the same first 3,000 characters, their first two hashes
    are equal. The last hash covers the whole text, up to 262,144 characters.
    """
    text = "\n".join(_texts(parts))
    running = blake2b(digest_size=8)
    hashes = []
    for start in range(0, min(len(text), _STRIDE * _MAX_HASHES), _STRIDE):
        running.update(text[start : start + _STRIDE].encode(errors="surrogatepass"))
        hashes.append(int.from_bytes(running.copy().digest()))
    return tuple(hashes)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
