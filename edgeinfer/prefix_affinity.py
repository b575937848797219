"""Prefix hashes of a prompt, and an LRU map from prefix hash to the replica that prefilled it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

#: Characters between two hashes: about the 256 tokens of a KV block.
_STRIDE = 1024
#: Most hashes per prompt: only the first 256 Ki characters of longer texts count.
_MAX_HASHES = 256
#: Most hashes in the map: some 30 MB.
_MAX_ENTRIES = 200_000


class PrefixAffinity:
    """Maps prefix hashes to the replica that prefilled them last; evicts the least recently used."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._replica: OrderedDict[int, Any] = OrderedDict()

    def find(self, hashes: Sequence[int], replicas: Any) -> Any:
        """Return the one of `replicas` that prefilled the longest of these prefixes, otherwise None."""
        for prefix in reversed(hashes):
            replica = self._replica.get(prefix)
            if replica is not None and replica in replicas:
                return replica
        return None

    def note(self, hashes: Sequence[int], replica: Any) -> None:
        """Record that `replica` prefills all of these prefixes."""
        for prefix in hashes:
            self._replica[prefix] = replica
            self._replica.move_to_end(prefix)
        while len(self._replica) > self._max_entries:
            self._replica.popitem(last=False)


def prefix_hashes(*parts: object) -> tuple[int, ...]:
    """Hash the first 1,024 characters of a prompt, the first 2,048 and so on.

    `parts` are texts, or lists and dicts of them at any depth, in prompt order. A hash is 64 bits of
    BLAKE2b over the whole prefix, so two prompts share as many hashes as they share strides. A shorter
    last stride is hashed too, unless it is empty, so that short prompts have a hash.
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
