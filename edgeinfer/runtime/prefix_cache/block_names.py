"""Names of KV blocks: keyed hashes, which reveal no text without the user's secret.

A name depends on everything that decides a block's bytes: the model and how it is computed
(`identity`), the cache `salt`, the adapters, all tokens before the block, and its own. It is the hash
of the parent's name and of the block's tokens, so a prefix has one chain of names and needs no index.
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
#: Number of tokens in a block, unless a sliding window is shorter.
BLOCK_TOKENS = 256
#: Lengths (tokens) of the prefixes by which a partial block is searched, longest first.
TAIL_KEYS_TOKENS = (32, 16, 8, 4, 2, 1)
TAIL_KEY_TOKENS = TAIL_KEYS_TOKENS[0]


def read_secret(path: Path, secret_if_new: bytes = b"") -> bytes:
    """Read the secret in `path` (0600), or create it as `secret_if_new` or random. Raises OSError."""
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
        path.unlink(missing_ok=True)  # the disk was full when the file was created
    raise OSError(f"no secret can be kept in {path}")


def model_key(sha256: str, files: Sequence[str]) -> str:
    """Return a model's sha256, or the stamps of files that have none. Raises OSError."""
    return sha256 or stamps(files)


class BlockNames:
    """Names one model's blocks. `identity` is a digest of all settings that change a block's bytes."""

    def __init__(self, secret: bytes, identity: bytes, block_tokens: int) -> None:
        self._secret = secret
        self.identity = identity
        self.block_tokens = block_tokens

    def root(self, adapters: AdapterKey = (), salt: str = "") -> bytes:
        """Name the parent of the first block. Requests with different salts share no blocks."""
        scales = "\0".join(f"{scale} {stamp}" for stamp, scale in adapters)
        return self._hash(b"root", self.identity, salt.encode(), scales.encode())

    def chain(self, tokens: PromptTokens, adapters: AdapterKey, salt: str) -> Chain:
        """Return the root, and the name of every whole block."""
        chain = Chain([self.root(adapters, salt)])
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: Chain, tokens: PromptTokens) -> None:
        """Append the names of the whole blocks of `tokens` that `chain` lacks.

        A block is longer if it would end inside a picture whose rows share a position.
        """
        start = chain.ends[-1]
        while (block_end := tokens.block_end(start + self.block_tokens)) <= len(tokens):
            chain.names.append(self.full(chain.names[-1], tokens[start:block_end]))
            chain.ends.append(block_end)
            start = block_end

    def full(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the name of a whole block after `parent`."""
        return self._hash(b"full", parent, pack_tokens(tokens))

    def tail(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return a partial block's name. It depends on the first tokens: a longer block replaces it."""
        n_key = next((n for n in TAIL_KEYS_TOKENS if n <= len(tokens)), 0)
        return self._hash(b"tail", parent, pack_tokens(tokens[:n_key]))

    def checkpoint(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return a checkpoint's name; a checkpoint a few tokens later has the same name."""
        n_key = len(tokens) // TAIL_KEY_TOKENS * TAIL_KEY_TOKENS
        return self._hash(b"point", parent, pack_tokens(tokens[:n_key]))

    def rows(self, digest: bytes) -> bytes:
        """Return the name of a picture's rows."""
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
    """Names of a prefix's root and whole blocks, and the number of tokens up to each block's end."""

    names: list[bytes]
    ends: list[int] = field(default_factory=lambda: [0])

    def index_at(self, n_tokens: int) -> int:
        """Return the index of the last block that ends within the first `n_tokens`."""
        return bisect_right(self.ends, n_tokens) - 1
