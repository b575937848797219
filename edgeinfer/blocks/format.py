"""The file of one computed block: every byte of it is written and read here.

    offset  bytes
    0       8      MAGIC, the version in it
    8       8      XXH3 (64 bits) of everything from byte 16 on, little endian
    16      8      length of the file
    24      4      length of the header
    28      ...    header: msgpack of `Header`
    64 * n  ...    the parts, each from a multiple of 64 on, zeros between

A part is a sequence state as llama.cpp gives it. Nothing of a file is used before its checksum is
right: llama.cpp asserts on damaged states.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import xxhash

from edgeinfer.errors import BlockDamagedError

MAGIC = b"eiblock2"
_HEAD = struct.Struct("<8sQQI")
_CHECKED_FROM = 16
_ALIGN = 64

#: "full": a whole block of a chain. "tail": what is left behind the last whole one. "point": like a
#: tail, with the state of a recurrent model at its end.
Kind = Literal["full", "tail", "point"]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a block says of itself. `tokens` are int32, little endian; `sizes` the parts' bytes."""

    kind: Kind
    name: bytes
    parent: bytes
    identity: bytes
    tokens: bytes
    sizes: tuple[int, ...]


class Block(msgspec.Struct, frozen=True):
    """A block in memory: its header and its parts, bytes."""

    header: Header
    parts: tuple[memoryview, ...]

    @property
    def tokens(self) -> list[int]:
        return unpack_tokens(self.header.tokens)

    @property
    def n_bytes(self) -> int:
        return sum(self.header.sizes)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as the bytes that names and headers hold."""
    return np.asarray(tokens, "<i4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The tokens of `pack_tokens`."""
    return list(np.frombuffer(packed, "<i4").tolist())


def encode(block: Block) -> list[bytes | memoryview]:
    """The file as buffers to be written one after another."""
    header = msgspec.msgpack.encode(block.header)
    buffers: list[bytes | memoryview] = [header]
    size = _HEAD.size + len(header)
    for part in block.parts:
        padding = -size % _ALIGN
        buffers += [bytes(padding), part]
        size += padding + part.nbytes
    checksum = xxhash.xxh3_64(_HEAD.pack(MAGIC, 0, size, len(header))[_CHECKED_FROM:])
    for buffer in buffers:
        checksum.update(buffer)
    return [_HEAD.pack(MAGIC, checksum.intdigest(), size, len(header)), *buffers]


def read_header(start: bytes | memoryview) -> Header:
    """The header from the beginning of a file, unchecked: for listing. Raises BlockDamagedError."""
    try:
        magic, _, _, length = _HEAD.unpack_from(start)
        if magic != MAGIC:
            raise BlockDamagedError("it is no block of this version")
        return msgspec.msgpack.decode(start[_HEAD.size : _HEAD.size + length], type=Header)
    except (struct.error, msgspec.MsgspecError) as error:
        raise BlockDamagedError(f"its header cannot be read: {error}") from error


def decode(data: memoryview) -> Block:
    """The block in `data`; its parts are views of it. Raises BlockDamagedError before one is used."""
    if len(data) < _HEAD.size:
        raise BlockDamagedError("it is shorter than its head")
    magic, checksum, size, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BlockDamagedError("it is no block of this version")
    if size != len(data):
        raise BlockDamagedError(f"it has {len(data)} bytes and promises {size}")
    if xxhash.xxh3_64_intdigest(data[_CHECKED_FROM:]) != checksum:
        raise BlockDamagedError("its checksum is wrong")
    header = read_header(data)
    return Block(header, tuple(_parts(data, _HEAD.size + length, header.sizes)))


def _parts(data: memoryview, at: int, sizes: Sequence[int]) -> Iterator[memoryview]:
    for size in sizes:
        at += -at % _ALIGN
        if size < 0 or at + size > len(data):
            raise BlockDamagedError("its parts do not fit into it")
        yield data[at : at + size]
        at += size
