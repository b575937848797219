"""Names the blocks of sequences: a chain of whole ones, and what is left behind the last."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.blocks.format import Header, unpack_tokens
from edgeinfer.blocks.names import TAIL_KEY_TOKENS, TAIL_KEYS_TOKENS
from edgeinfer.blocks.store import ModelBlocks
from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey, common_prefix


class BlockNames:
    """Names of one model's blocks of `block_tokens`."""

    def __init__(self, blocks: ModelBlocks, block_tokens: int) -> None:
        self._blocks = blocks
        self.block_tokens = block_tokens

    def root(self, adapters: AdapterKey, salt: str) -> bytes:
        """The name that a chain begins with."""
        words = "\0".join(f"{scale} {stamp}" for stamp, scale in adapters)
        return self._blocks.names.root(salt, words)

    def chain(self, tokens: list[int], adapters: AdapterKey, salt: str) -> list[bytes]:
        """The root, and the name of every whole block."""
        chain = [self.root(adapters, salt)]
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: list[bytes], tokens: list[int]) -> None:
        """Add the names of the whole blocks of `tokens` that `chain` lacks."""
        size = self.block_tokens
        for at in range((len(chain) - 1) * size, len(tokens) - size + 1, size):
            chain.append(self._blocks.names.full(chain[-1], tokens[at : at + size]))

    def begun_with(self, agent: str, adapters: AdapterKey, salt: str) -> list[int]:
        """The tokens that sessions of `agent` begin with, and those of the last one behind them.

        As far as they are there.
        """
        behind: dict[bytes, Header] = {}
        for name in self._blocks.begun_with(agent, salt):
            header = self._blocks.header(name)
            if header is not None:
                behind.setdefault(header.parent, header)
        tokens: list[int] = []
        header = behind.get(self.root(adapters, salt))
        while header is not None:
            tokens += unpack_tokens(header.tokens)
            header = behind.get(header.name)
        return tokens

    def last_point(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """The longest point behind `parent` that `tokens` begin with, and its tokens; 0 for none."""
        best, n_best = b"", 0
        for name in self._places(parent, tokens):
            header = self._blocks.header(name)
            its = unpack_tokens(header.tokens) if header else []
            if len(its) > n_best and common_prefix(its, tokens) == len(its):
                best, n_best = name, len(its)
        return best, n_best

    def _places(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        """Where points may be that `tokens` begin with: each has a place by its length."""
        names = self._blocks.names
        if len(tokens) >= TAIL_KEY_TOKENS:
            yield names.tail(parent, tokens)
        for n in range(len(tokens), TAIL_KEY_TOKENS - 1, -TAIL_KEY_TOKENS):
            yield names.point(parent, tokens[:n])

    def tail(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """The unfinished block behind `parent` most like `tokens`, and how much agrees; 0 for none."""
        best, n_best = b"", 0
        for name, its in self._tails(parent, tokens):
            n = common_prefix(its, tokens)
            if n > n_best:
                best, n_best = name, n
        return best, n_best

    def superseded(self, parent: bytes, tokens: list[int], by: bytes) -> bytes | None:
        """The tail behind `parent` that has only what `tokens` begin with, which `by` has too."""
        for name, its in self._tails(parent, tokens):
            if name != by and common_prefix(its, tokens) == len(its):
                return name
        return None

    def _tails(self, parent: bytes, tokens: list[int]) -> Iterator[tuple[bytes, list[int]]]:
        for n_key in TAIL_KEYS_TOKENS:
            name = self._blocks.names.tail(parent, tokens[:n_key])
            header = self._blocks.header(name) if n_key <= len(tokens) else None
            if header is not None:
                yield name, unpack_tokens(header.tokens)

    def straddling(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """A whole block behind `parent` in which what an agent's sessions share ends: the one that
        agrees furthest with `tokens`, and how far; 0 where none is known.
        """
        headers = ((name, self._blocks.header(name)) for name in self._blocks.straddling(parent))
        found = [
            (name, common_prefix(unpack_tokens(header.tokens), tokens))
            for name, header in headers
            if header is not None and header.parent == parent
        ]
        return max(found, key=lambda one: one[1], default=(b"", 0))
