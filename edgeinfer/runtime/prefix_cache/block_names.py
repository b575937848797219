"""Names of KV blocks: keyed hashes, which reveal no text without the user's secret.

A block's name is a hash of its tokens and of the name of the block before it, its parent. The parent of
a first block, the root, is a hash of the model, its settings (`identity`), the adapters and the cache
salt. So a name stands for everything on which the block's bytes depend, and equal prefixes have equal
names.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.platform.disk import new_file, open_private, stamps
from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.prefix_cache.block_file import pack_tokens
from edgeinfer.runtime.prompt_tokens import PromptTokens

NAME_BYTES = 20
SECRET_BYTES = 32
#: Tokens per block, unless the model has a shorter sliding window.
BLOCK_TOKENS = 256
#: The name of a partial block is a hash of its first 32 tokens; if it has fewer, of 16, 8, and so on.
TAIL_KEYS_TOKENS = (32, 16, 8, 4, 2, 1)
TAIL_KEY_TOKENS = TAIL_KEYS_TOKENS[0]


def read_secret(path: Path, secret_if_new: bytes = b"") -> bytes:
    """Read the secret in `path`, or write `secret_if_new` or random bytes there. Raises OSError."""
    for _ in range(2):
        try:
            with open(open_private(path), "rb") as file:
                secret = file.read()
        except FileNotFoundError:
            with new_file(path, 0o600, replaces=False) as file:
                file.write(secret_if_new or os.urandom(SECRET_BYTES))
            continue
        if len(secret) == SECRET_BYTES:
            return secret
        path.unlink(missing_ok=True)  # incomplete: the disk was full
    raise OSError(f"the secret in {path} cannot be written")


def block_tokens(window: int) -> int:
    """Return the tokens per block: a power of two below the sliding `window` (0 for none)."""
    if window <= 0 or window > BLOCK_TOKENS:
        return BLOCK_TOKENS
    return max(1, 1 << ((window - 1).bit_length() - 1))


def model_key(sha256: str, files: Sequence[str]) -> str:
    """Return a model's key: `sha256`, or the stamps of `files` if `sha256` is "". Raises OSError."""
    return sha256 or stamps(files)


class BlockNames:
    """Computes the names of one model's KV blocks.

    `identity` is a digest of the model and of all settings that change the cache's contents.
    """

    def __init__(self, secret: bytes, identity: bytes, block_tokens: int) -> None:
        self._secret = secret
        self.identity = identity
        self.block_tokens = block_tokens

    def root(self, adapters: AdapterKey = (), salt: str = "") -> bytes:
        """Return the parent name of a prompt's first block, which differs by adapters and salt."""
        scales = "\0".join(f"{scale} {stamp}" for stamp, scale in adapters)
        return self._hash(b"root", self.identity, salt.encode(), scales.encode())

    def chain(self, tokens: PromptTokens, adapters: AdapterKey, salt: str) -> Chain:
        """Return the names of the whole blocks of `tokens`."""
        chain = Chain([self.root(adapters, salt)])
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: Chain, tokens: PromptTokens) -> None:
        """Append the names of further whole blocks of `tokens` to `chain`.

        A block that would end inside a picture whose rows share positions contains the whole picture.
        """
        start = chain.ends[-1]
        while (block_end := tokens.block_end(start + self.block_tokens)) <= len(tokens):
            chain.names.append(self.full(chain.names[-1], tokens[start:block_end]))
            chain.ends.append(block_end)
            start = block_end

    def full(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the name of the whole block with these tokens after `parent`."""
        return self._hash(b"full", parent, pack_tokens(tokens))

    def tail(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the name of a partial block after `parent`: a hash of its first 1 to 32 tokens."""
        n_key = next((n for n in TAIL_KEYS_TOKENS if n <= len(tokens)), 0)
        return self._hash(b"tail", parent, pack_tokens(tokens[:n_key]))

    def checkpoint(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the name of a block that ends at a checkpoint: a hash of its first 32 * n tokens."""
        n_key = len(tokens) // TAIL_KEY_TOKENS * TAIL_KEY_TOKENS
        return self._hash(b"point", parent, pack_tokens(tokens[:n_key]))

    def rows(self, digest: bytes) -> bytes:
        """Return the name of the block with the rows of a picture."""
        return self._hash(b"rows", self.identity, digest)

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        state = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES, person=kind.ljust(16, b"\0"))
        for chunk in parts:
            state.update(len(chunk).to_bytes(8, "little") + chunk)
        return state.digest()


def owner_name(secret: bytes, conversation: str) -> str:
    text = conversation.encode()
    return hashlib.blake2b(text, key=secret, digest_size=NAME_BYTES, person=b"owner").hexdigest()


@dataclass(slots=True)
class Chain:
    """Names and ends (tokens) of a prefix's whole blocks, after the root's name and end 0."""

    names: list[bytes]
    ends: list[int] = field(default_factory=lambda: [0])

    def index_at(self, n_tokens: int) -> int:
        """Return the index of the last block within the first `n_tokens`; 0, the root, for none."""
        return bisect_right(self.ends, n_tokens) - 1
