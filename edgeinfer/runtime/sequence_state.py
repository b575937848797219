"""The state of a sequence as bytes: what llama.cpp saves and restores, and what a KV block holds."""

from __future__ import annotations

import os

import msgspec

#: Offset of a piece that may begin anywhere in a page.
ANYWHERE = -1


class MappedFile:
    """A file mapped from its first byte on, at `address`; its descriptor is closed with this object."""

    def __init__(self, descriptor: int, address: int) -> None:
        self.descriptor, self.address = descriptor, address

    def __del__(self) -> None:
        os.close(self.descriptor)


class State(msgspec.Struct, frozen=True):
    """A sequence's state as bytes. Each of `pieces` has cells of a tensor, or metadata between them.

    `page_offsets` are their best offsets within a page, or ANYWHERE. `file` is the file that they are
    views of, None for other memory.
    """

    pieces: tuple[memoryview, ...]
    page_offsets: tuple[int, ...]
    file: MappedFile | None = None

    @property
    def n_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        sizes = (piece.nbytes for piece in self.pieces)
        return tuple(zip(sizes, self.page_offsets, strict=True))

    def join_pieces(self) -> memoryview:
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))


def as_state(state: memoryview) -> State:
    """Make a state of one piece, which may lie anywhere."""
    return State((state,), (ANYWHERE,))
