"""Names of KV blocks: keyed hashes, which reveal no text without the user's secret.

A name depends on everything that decides a block's bytes: the model and its way to compute
(`identity`), the cache `salt`, the adapters, all tokens before the block, and its own. It is the hash
of the parent's name and of the block's tokens, so a prefix has one chain of names and no index."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.platform.disk import new_file, open_own, stamps
from edgeinfer.runtime.kv_cache import AdapterKey, common_prefix
from edgeinfer.runtime.prefix_cache.format import Header, pack_tokens, unpack_tokens
from edgeinfer.runtime.prompt_tokens import PromptTokens

if TYPE_CHECKING:
    from edgeinfer.runtime.prefix_cache.store import ModelBlocks

NAME_BYTES = 20
SECRET_BYTES = 32
#: Numbers of first tokens that a partial block is found by, longest first.
TAIL_KEYS_TOKENS = (32, 16, 8, 4, 2, 1)
TAIL_KEY_TOKENS = TAIL_KEYS_TOKENS[0]


def read_secret(path: Path, own: bytes = b"") -> bytes:
    """Read the user's secret in `path` (0600), or create it as `own` or random. Raises OSError."""
    for _ in range(2):
        try:
            with open(open_own(path), "rb") as file:
                secret = file.read()
        except FileNotFoundError:
            with new_file(path, 0o600, replaces=False) as file:
                file.write(own or os.urandom(SECRET_BYTES))
            continue
        if len(secret) == SECRET_BYTES:
            return secret
        path.unlink(missing_ok=True)  # the disk was full when it was made
    raise OSError(f"no secret can be kept in {path}")


def model_key(sha256: str, files: Sequence[str]) -> str:
    """Return a model's sha256, or the stamps of files without one. Raises OSError."""
    return sha256 or stamps(files)


class Names:
    """The names of one model's blocks. `identity` is a digest of what decides their bits."""

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._secret = secret
        self.identity = identity

    def root(self, salt: str = "", adapters: str = "") -> bytes:
        """Name the parent of a first block. Requests with another salt share nothing."""
        return self._hash(b"root", self.identity, salt.encode(), adapters.encode())

    def full(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name a whole block behind `parent`."""
        return self._hash(b"full", parent, pack_tokens(tokens))

    def tail(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name a partial block; it depends on the first tokens only, so a longer one replaces it."""
        n_key = next((n for n in TAIL_KEYS_TOKENS if n <= len(tokens)), 0)
        return self._hash(b"tail", parent, pack_tokens(tokens[:n_key]))

    def checkpoint(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name a checkpoint at the end of `tokens`; one a few tokens later has the same name."""
        n_key = len(tokens) // TAIL_KEY_TOKENS * TAIL_KEY_TOKENS
        return self._hash(b"point", parent, pack_tokens(tokens[:n_key]))

    def rows(self, digest: bytes) -> bytes:
        """Name the rows of a picture."""
        return self._hash(b"rows", self.identity, digest)

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        state = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES, person=kind.ljust(16, b"\0"))
        for part in parts:
            state.update(len(part).to_bytes(8, "little") + part)
        return state.digest()


def owner_name(secret: bytes, conversation: str) -> str:
    text = conversation.encode()
    return hashlib.blake2b(text, key=secret, digest_size=NAME_BYTES, person=b"owner").hexdigest()


@dataclass(slots=True)
class Chain:
    """The names of a prefix's root and of its whole blocks, and how many tokens end with each."""

    names: list[bytes]
    ends: list[int] = field(default_factory=lambda: [0])

    def at(self, n_tokens: int) -> int:
        """Return the place of the last block that ends within the first `n_tokens`."""
        return bisect_right(self.ends, n_tokens) - 1


class PrefixKeys:
    """Names of one model's blocks of `block_tokens`."""

    def __init__(self, blocks: ModelBlocks, block_tokens: int) -> None:
        self._blocks = blocks
        self.block_tokens = block_tokens

    def root(self, adapters: AdapterKey, salt: str) -> bytes:
        words = "\0".join(f"{scale} {stamp}" for stamp, scale in adapters)
        return self._blocks.names.root(salt, words)

    def chain(self, tokens: PromptTokens, adapters: AdapterKey, salt: str) -> Chain:
        """Return the root, and the name of every whole block."""
        chain = Chain([self.root(adapters, salt)])
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: Chain, tokens: PromptTokens) -> None:
        """Append the whole blocks of `tokens` that `chain` lacks.

        A block is longer if it would end inside a picture whose rows lie in one place.
        """
        start = chain.ends[-1]
        while (end := tokens.block_end(start + self.block_tokens)) <= len(tokens):
            chain.names.append(self._blocks.names.full(chain.names[-1], tokens[start:end]))
            chain.ends.append(end)
            start = end

    def begun_with(self, agent: str, adapters: AdapterKey, salt: str) -> list[int]:
        """Return the tokens that sessions of `agent` share, and those behind them in the latest one.

        Only tokens on disk count.
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

    def last_checkpoint(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """Find the longest checkpoint on the path of `tokens`: its name and tokens, 0 for none."""
        best, n_best = b"", 0
        for name in self._places(parent, tokens):
            header = self._blocks.header(name)
            its = unpack_tokens(header.tokens) if header else []
            if len(its) > n_best and common_prefix(its, tokens) == len(its):
                best, n_best = name, len(its)
        return best, n_best

    def _places(self, parent: bytes, tokens: list[int]) -> Iterator[bytes]:
        """Name the checkpoints that may lie on the path of `tokens`, longest first."""
        names = self._blocks.names
        if len(tokens) >= TAIL_KEY_TOKENS:
            yield names.tail(parent, tokens)
        for n in range(len(tokens), TAIL_KEY_TOKENS - 1, -TAIL_KEY_TOKENS):
            yield names.checkpoint(parent, tokens[:n])

    def tail(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """Find the partial block behind `parent` most like `tokens`, and how many agree; 0 for none."""
        best, n_best = b"", 0
        for name, its in self._tails(parent, tokens):
            n = common_prefix(its, tokens)
            if n > n_best:
                best, n_best = name, n
        return best, n_best

    def superseded(self, parent: bytes, tokens: list[int], by: bytes) -> bytes | None:
        """Find a partial block whose tokens are all in `tokens`, and so in block `by`."""
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

    def boundary_blocks(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """Find the whole block behind `parent` in which an agent's shared prefix ends and that agrees
        longest with `tokens`: its name and that length, 0 for none.
        """
        headers = ((name, self._blocks.header(name)) for name in self._blocks.boundary_blocks(parent))
        found = [
            (name, common_prefix(unpack_tokens(header.tokens), tokens))
            for name, header in headers
            if header is not None and header.parent == parent
        ]
        return max(found, key=lambda one: one[1], default=(b"", 0))
