"""Names for the beginnings of a request's text, and who has read which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

#: Characters between two names: about the 256 tokens that a computed block holds.
_STRIDE = 1024
#: Beginnings that are named: of longer texts the first 256 Ki characters count.
_MOST = 256
#: Beginnings that are remembered, the latest used: some 30 MB at the most.
_REMEMBERED = 200_000


class Readers:
    """Who has read which beginning; the least recently used are forgotten first."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._reader: OrderedDict[int, Any] = OrderedDict()

    def find(self, beginnings: Sequence[int], readers: Any) -> Any:
        """The reader of the longest known beginning that is among `readers`, else None."""
        for name in reversed(beginnings):
            reader = self._reader.get(name)
            if reader is not None and reader in readers:
                return reader
        return None

    def note(self, beginnings: Sequence[int], reader: Any) -> None:
        """`reader` reads all of these."""
        for name in beginnings:
            self._reader[name] = reader
            self._reader.move_to_end(name)
        while len(self._reader) > self._most:
            self._reader.popitem(last=False)


def names(*parts: object) -> tuple[int, ...]:
    """Name what the texts in `parts` begin with: 1,024 characters, 2,048 and so on, shortest first.

    `parts` are texts, or lists and dicts of them at any depth, in the order in which they are read.
    A name is 64 bits of BLAKE2b over all that stands before, so two readings share as many names as
    they share strides from the beginning. The last stride counts though it is short, unless it is
    empty: short prompts have a name too.
    """
    text = "\n".join(_texts(parts))
    running = blake2b(digest_size=8)
    found = []
    for start in range(0, min(len(text), _STRIDE * _MOST), _STRIDE):
        running.update(text[start : start + _STRIDE].encode(errors="surrogatepass"))
        found.append(int.from_bytes(running.copy().digest()))
    return tuple(found)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
