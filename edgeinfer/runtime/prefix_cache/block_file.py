"""The file of a KV block: `write` it, `decode` its contents.

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

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import xxhash

from edgeinfer.errors import BlockDamagedError
from edgeinfer.platform.disk import new_file
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.sequence_state import ANYWHERE, MappedFile, State

MAGIC = b"eiblock3" if mmap.PAGESIZE == 4096 else b"eiblk%03d" % (mmap.PAGESIZE >> 10)
_HEAD = struct.Struct("<8sQQI")
_CHECKED_FROM = 16
_ALIGN = 64

#: "full": a whole block. "tail": the partial block at the end of a sequence. "point": a partial block
#: that ends at a checkpoint of a recurrent model. "rows": the embedding rows of a picture (f32), which
#: do not depend on the prompt; their `tokens` are the picture's width and height.
Kind = Literal["full", "tail", "point", "rows"]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a block. `tokens` are int32, little endian.

    `states` has the size (bytes) and the page offset of each piece of each state; the offset is in
    [0, page size), or ANYWHERE.
    """

    kind: Kind
    name: bytes
    parent: bytes
    identity: bytes
    tokens: bytes
    states: tuple[tuple[tuple[int, int], ...], ...]


class KvBlock(msgspec.Struct, frozen=True):
    """A block in memory. `states`: the state of the tokens, then the checkpoint's if there is one."""

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
            raise BlockDamagedError("the file is not a block of this version's format")
        return msgspec.msgpack.decode(start[_HEAD.size : _HEAD.size + length], type=Header)
    except (struct.error, msgspec.MsgspecError) as error:
        raise BlockDamagedError(f"the block's header cannot be decoded: {error}") from error


def decode(data: memoryview, file: MappedFile | None = None) -> KvBlock:
    """Verify and decode the block in `data`, mapped from `file`. Raises BlockDamagedError."""
    header = read_header(data)
    _, checksum, size, length = _HEAD.unpack_from(data)
    if size != len(data):
        raise BlockDamagedError(f"the block's file has {len(data)} bytes; its header says {size}")
    computed = xxhash.xxh3_64()  # not xxh3_64_intdigest, which holds the GIL
    computed.update(data[_CHECKED_FROM:])
    if computed.intdigest() != checksum:
        raise BlockDamagedError("the block's checksum is wrong")
    return KvBlock(header, tuple(_states(data, _HEAD.size + length, header.states, file)))


def _states(
    data: memoryview, offset: int, states: Sequence[Sequence[tuple[int, int]]], file: MappedFile | None
) -> Iterator[State]:
    for sizes in states:
        pieces = []
        for size, page_offset in sizes:
            offset += _padding(offset, page_offset)
            if size < 0 or offset + size > len(data):
                raise BlockDamagedError("the sizes in the block's header exceed the file")
            pieces.append(data[offset : offset + size])
            offset += size
        yield State(tuple(pieces), tuple(page_offset for _, page_offset in sizes), file)


def _padding(size: int, page_offset: int) -> int:
    """Return how many zeros precede a piece in a file that has `size` bytes so far."""
    return -size % _ALIGN if page_offset == ANYWHERE else (page_offset - size) % mmap.PAGESIZE
