"""What blocks are called: keyed hashes, which tell nobody without the user's secret what was read.

A name stands for everything that decides the bytes behind it: the model and how it computes
(`identity`), who may share it (`salt`), the adapters, every token before, and its own. It is the hash
of its parent's name and its tokens, so a prefix has one chain of names and no index.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.blocks.format import pack_tokens
from edgeinfer.platform.disk import new_file, open_own, stamps

NAME_BYTES = 20
SECRET_BYTES = 32
#: A tail is found by so many of its first tokens, the most that it has.
TAIL_KEYS_TOKENS = (32, 16, 8, 4, 2, 1)
TAIL_KEY_TOKENS = TAIL_KEYS_TOKENS[0]


def read_secret(path: Path, own: bytes = b"") -> bytes:
    """The user's secret in `path` (0600); where there is none, `own` or a new one. Raises OSError."""
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
    """A model's sha256, or the stamps of files that nobody has hashed. Raises OSError."""
    return sha256 or stamps(files)


class Names:
    """The names of one model's blocks. `identity` is a digest of what decides their bits."""

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._secret = secret
        self.identity = identity

    def root(self, salt: str = "", adapters: str = "") -> bytes:
        """The parent of a first block. Who gives another salt finds nothing of others."""
        return self._hash(b"root", self.identity, salt.encode(), adapters.encode())

    def full(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The name of a whole block behind `parent`."""
        return self._hash(b"full", parent, pack_tokens(tokens))

    def tail(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The name of what begins with `tokens` behind `parent`; the next write supersedes it."""
        n_key = next((n for n in TAIL_KEYS_TOKENS if n <= len(tokens)), 0)
        return self._hash(b"tail", parent, pack_tokens(tokens[:n_key]))

    def point(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The name of a point at the end of `tokens`; one a few tokens further on supersedes it."""
        n_key = len(tokens) // TAIL_KEY_TOKENS * TAIL_KEY_TOKENS
        return self._hash(b"point", parent, pack_tokens(tokens[:n_key]))

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        state = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES, person=kind.ljust(16, b"\0"))
        for part in parts:
            state.update(len(part).to_bytes(8, "little") + part)
        return state.digest()


def owner_name(secret: bytes, conversation: str) -> str:
    """The name of the list of blocks that hold a conversation."""
    text = conversation.encode()
    return hashlib.blake2b(text, key=secret, digest_size=NAME_BYTES, person=b"owner").hexdigest()
