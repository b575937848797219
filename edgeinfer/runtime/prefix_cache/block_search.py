"""Find the blocks on disk that continue a prompt's prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from edgeinfer.runtime.kv_cache import AdapterKey, common_prefix
from edgeinfer.runtime.prefix_cache.block_file import Header, unpack_tokens
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder
from edgeinfer.runtime.prefix_cache.block_names import TAIL_KEY_TOKENS, TAIL_KEYS_TOKENS

#: Name of a block, and how many of its first tokens equal the prompt's; (b"", 0) if there is no block.
Match = tuple[bytes, int]


class BlockSearch:
    """Searches the blocks of one model, by reading the headers of a few files.

    `parent` is the name of the prompt's last whole block, `tokens` are the prompt's tokens after it.
    """

    def __init__(self, folder: BlockFolder) -> None:
        self._folder = folder

    def agent_prefix(self, agent: str, adapters: AdapterKey, salt: str) -> list[int]:
        """Return the tokens of `Engine.agent_prefix`, with pseudo-tokens of pictures."""
        following: dict[bytes, Header] = {}
        for name in self._folder.agent_blocks(agent, salt):
            header = self._folder.header(name)
            if header is not None:
                following.setdefault(header.parent, header)
        tokens: list[int] = []
        header = following.get(self._folder.names.root(adapters, salt))
        while header is not None:
            tokens += unpack_tokens(header.tokens)
            header = following.get(header.name)
        return tokens

    def find_checkpoint(self, parent: bytes, tokens: list[int]) -> Match:
        """Find the longest block whose tokens are a prefix of `tokens` and end at a checkpoint."""
        blocks = self._read(self._checkpoint_names(parent, tokens))
        matches = [(name, len(saved)) for name, saved in blocks if tokens[: len(saved)] == saved]
        return max(matches, key=itemgetter(1), default=_NO_MATCH)

    def _checkpoint_names(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        names = self._folder.names
        if len(tokens) >= TAIL_KEY_TOKENS:
            yield names.tail(parent, tokens)
        for n in range(len(tokens), TAIL_KEY_TOKENS - 1, -TAIL_KEY_TOKENS):
            yield names.checkpoint(parent, tokens[:n])

    def find_tail(self, parent: bytes, tokens: list[int]) -> Match:
        """Find the partial block that has the longest common prefix with `tokens`."""
        return _longest(self._read(self._tail_names(parent, tokens)), tokens)

    def find_superseded(self, parent: bytes, tokens: list[int], by: bytes) -> bytes | None:
        """Return the name of a partial block that block `by` with `tokens` contains, or None."""
        blocks = self._read(self._tail_names(parent, tokens))
        return next((n for n, saved in blocks if n != by and tokens[: len(saved)] == saved), None)

    def _tail_names(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        lengths = (n for n in TAIL_KEYS_TOKENS if n <= len(tokens))
        return (self._folder.names.tail(parent, tokens[:n]) for n in lengths)

    def find_boundary_block(self, parent: bytes, tokens: list[int]) -> Match:
        """Find the block most similar to `tokens` that is recorded after an agent's shared `parent`."""
        return _longest(self._read(self._folder.boundary_blocks(parent), parent), tokens)

    def _read(
        self, names: Iterable[bytes], parent: bytes | None = None
    ) -> Iterator[tuple[bytes, list[int]]]:
        """Yield names and tokens of the blocks that exist; with `parent`, only of its children."""
        for name in names:
            header = self._folder.header(name)
            if header is not None and parent in (None, header.parent):
                yield name, unpack_tokens(header.tokens)


_NO_MATCH: Match = (b"", 0)


def _longest(blocks: Iterable[tuple[bytes, list[int]]], tokens: list[int]) -> Match:
    matches = [(name, common_prefix(saved, tokens)) for name, saved in blocks]
    best = max(matches, key=itemgetter(1), default=_NO_MATCH)
    return best if best[1] else _NO_MATCH
