"""A KV block on disk: its name, and its file.

A name is a keyed hash, which reveals no text without the user's secret: of the block's tokens and of
the name of the block before it, its parent. The parent of a first block, the root, is a hash of the
model, its settings (`identity`), the adapters and the cache salt. So a name stands for everything on
which the block's bytes depend, and equal prefixes have equal names.

The file (`write`, `decode`):

    offset  bytes
    0       8      MAGIC, which contains the version
    8       8      XXH3 checksum (64 bits, little endian) of everything from byte 16 on
    16      8      length of the file
    24      4      length of the header
    28      ...    header: `Header` as msgpack
    64 * n  ...    the states' pieces in order, with zeros between them

A piece begins at a multiple of 64; a piece with KV cells begins at the page offset in the header, so
that its pages can be mapped into the KV cache. So the format depends on the page size, and so does
MAGIC. The checksum is verified, because llama.cpp aborts on damaged states.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import xxhash

from edgeinfer.errors import BlockDamagedError
from edgeinfer.platform.disk import new_file, open_private, stamps
from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.sequence_state import ANYWHERE, MappedFile, State

NAME_BYTES = 20
SECRET_BYTES = 32
#: Tokens per block, unless the model has a shorter sliding window.
BLOCK_TOKENS = 256
#: The name of a partial block is a hash of its first 32 tokens. A block with fewer tokens is named by
#: its first 16, 8, 4, 2 or 1.
TAIL_KEYS_TOKENS = (32, 16, 8, 4, 2, 1)
TAIL_KEY_TOKENS = TAIL_KEYS_TOKENS[0]

MAGIC = b"eiblock3" if mmap.PAGESIZE == 4096 else b"eiblk%03d" % (mmap.PAGESIZE >> 10)
_HEAD = struct.Struct("<8sQQI")
_CHECKED_FROM = 16
_ALIGN = 64

#: "full": a whole block. "tail": the partial block at the end of a sequence. "point": a partial block
#: that ends at a checkpoint of a recurrent model. "rows": the embedding rows of a picture (f32), which
#: do not depend on the prompt; their `tokens` are the picture's width and height.
Kind = Literal["full", "tail", "point", "rows"]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a block. `parent` is the name of the block before it in the prompt.

    `identity` is the digest of the model and its settings (see `BlockNames`). `tokens` are int32,
    little endian. `states` has a tuple per state: the size (bytes) and the page offset of each piece
    (see `State`).
    """

    kind: Kind
    name: bytes
    parent: bytes
    identity: bytes
    tokens: bytes
    states: tuple[tuple[tuple[int, int], ...], ...]


class KvBlock(msgspec.Struct, frozen=True):
    """A block in memory.

    `states[0]` is the state of the tokens; `states[1]`, if any, is a recurrent model's checkpoint after
    them. A block of kind "rows" has a state per part of the picture.
    """

    header: Header
    states: tuple[State, ...]

    @property
    def tokens(self) -> PromptTokens:
        return PromptTokens(unpack_tokens(self.header.tokens))

    @property
    def n_bytes(self) -> int:
        return sum(state.n_bytes for state in self.states)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the tokens that `pack_tokens` has packed."""
    return list(np.frombuffer(packed, "<i4").tolist())


def read_secret(path: Path, secret_if_new: bytes = b"") -> bytes:
    """Return the secret in `path`. Raises OSError.

    A missing file is written first, with `secret_if_new` or, if that is b"", with random bytes.
    """
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
    """Return the tokens per block: a power of two below the sliding `window` (0: no window)."""
    if window <= 0 or window > BLOCK_TOKENS:
        return BLOCK_TOKENS
    return max(1, 1 << ((window - 1).bit_length() - 1))


def model_key(sha256: str, files: Sequence[str]) -> str:
    """Return `sha256` or, if that is "", path, size, mtime and inode of each file. Raises OSError."""
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
        """Return the name that is the first block's parent. Adapters and salt change the name."""
        scales = "\0".join(f"{scale} {stamp}" for stamp, scale in adapters)
        return self._hash(b"root", self.identity, salt.encode(), scales.encode())

    def chain(self, tokens: PromptTokens, adapters: AdapterKey, salt: str) -> Chain:
        """Return the names of the whole blocks of `tokens`."""
        chain = Chain([self.root(adapters, salt)])
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: Chain, tokens: PromptTokens) -> None:
        """Append the names of the whole blocks of a prompt that `chain` does not have yet.

        With M-RoPE, rows of a picture share positions; then a block never ends inside a picture, but
        after it.
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
        """Return the name of a partial block after `parent`: a hash of the first tokens, at most 32."""
        n_key = next((n for n in TAIL_KEYS_TOKENS if n <= len(tokens)), 0)
        return self._hash(b"tail", parent, pack_tokens(tokens[:n_key]))

    def checkpoint(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the name of a block that ends at a checkpoint: a hash of its tokens.

        The number of tokens is rounded down to a multiple of 32, so the last tokens do not count.
        """
        n_key = len(tokens) // TAIL_KEY_TOKENS * TAIL_KEY_TOKENS
        return self._hash(b"point", parent, pack_tokens(tokens[:n_key]))

    def rows(self, digest: bytes) -> bytes:
        """Return the name of the block with embedding rows of a picture, identified by `digest`."""
        return self._hash(b"rows", self.identity, digest)

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        state = hashlib.blake2b(key=self._secret, digest_size=NAME_BYTES, person=kind.ljust(16, b"\0"))
        for chunk in parts:
            state.update(len(chunk).to_bytes(8, "little") + chunk)
        return state.digest()


def model_folder(model: str) -> str:
    return hashlib.blake2b(model.encode(), digest_size=8).hexdigest()


def owner_name(secret: bytes, conversation: str) -> str:
    text = conversation.encode()
    return hashlib.blake2b(text, key=secret, digest_size=NAME_BYTES, person=b"owner").hexdigest()


@dataclass(slots=True)
class Chain:
    """The names of a prompt's whole blocks, and the numbers of tokens up to their ends.

    `names[0]` is the name of the root (the parent of the first block), `ends[0]` is 0.
    """

    names: list[bytes]
    ends: list[int] = field(default_factory=lambda: [0])

    def index_at(self, n_tokens: int) -> int:
        """Return the index of the last block within the first `n_tokens`; 0, the root, for none."""
        return bisect_right(self.ends, n_tokens) - 1


def encode(block: KvBlock) -> list[bytes | memoryview]:
    """Return the contents of a block's file, as buffers to write one after the other."""
    states = tuple(state.sizes for state in block.states)
    header = msgspec.msgpack.encode(msgspec.structs.replace(block.header, states=states))
    buffers: list[bytes | memoryview] = [header]
    size = _HEAD.size + len(header)
    for state in block.states:
        for piece, page_offset in zip(state.pieces, state.page_offsets, strict=True):
            padding = _padding(size, page_offset)
            buffers += [bytes(padding), piece]
            size += padding + piece.nbytes
    checksum = xxhash.xxh3_64(_HEAD.pack(MAGIC, 0, size, len(header))[_CHECKED_FROM:])
    for buffer in buffers:
        checksum.update(buffer)
    return [_HEAD.pack(MAGIC, checksum.intdigest(), size, len(header)), *buffers]


def write(path: Path, block: KvBlock) -> int:
    """Write a block's file durably; return the size (bytes). After an OSError there is no file."""
    with new_file(path, 0o600) as file:
        for buffer in encode(block):
            file.write(buffer)
        file.flush()
        os.fdatasync(file.fileno())
        return file.tell()


def read_header(start: bytes | memoryview) -> Header:
    """Decode the header at a file's start without verifying the checksum. Raises BlockDamagedError."""
    try:
        magic, _, _, length = _HEAD.unpack_from(start)
        if magic != MAGIC:
            raise BlockDamagedError("the file is not a KV block in this version's format")
        return msgspec.msgpack.decode(start[_HEAD.size : _HEAD.size + length], type=Header)
    except (struct.error, msgspec.MsgspecError) as error:
        raise BlockDamagedError(f"the header of a KV block cannot be decoded: {error}") from error


def decode(data: memoryview, file: MappedFile | None = None) -> KvBlock:
    """Verify and decode the block in `data`, mapped from `file`. Raises BlockDamagedError."""
    header = read_header(data)
    _, checksum, size, length = _HEAD.unpack_from(data)
    if size != len(data):
        raise BlockDamagedError(f"a KV block has {len(data)} bytes, but its header says {size}")
    computed = xxhash.xxh3_64()  # not xxh3_64_intdigest, which holds the GIL
    computed.update(data[_CHECKED_FROM:])
    if computed.intdigest() != checksum:
        raise BlockDamagedError("the checksum of a KV block is wrong")
    return KvBlock(header, tuple(_states(data, _HEAD.size + length, header.states, file)))


def _states(
    data: memoryview, offset: int, states: Sequence[Sequence[tuple[int, int]]], file: MappedFile | None
) -> Iterator[State]:
    for sizes in states:
        pieces = []
        for size, page_offset in sizes:
            offset += _padding(offset, page_offset)
            if size < 0 or offset + size > len(data):
                raise BlockDamagedError("the sizes in the header of a KV block exceed the file")
            pieces.append(data[offset : offset + size])
            offset += size
        yield State(tuple(pieces), tuple(page_offset for _, page_offset in sizes), file)


def _padding(size: int, page_offset: int) -> int:
    """Return how many zeros precede a piece in a file that has `size` bytes so far."""
    return -size % _ALIGN if page_offset == ANYWHERE else (page_offset - size) % mmap.PAGESIZE
