"""The state of a sequence (the contents of its KV cells) as bytes, as llama.cpp saves it."""

from __future__ import annotations

import os

import msgspec

#: In `State.page_offsets`: this piece of the state may begin anywhere in a memory page.
ANYWHERE = -1


class MappedFile:
    """A file mapped into memory at `address`. Deleting this object closes the `descriptor`."""

    def __init__(self, descriptor: int, address: int) -> None:
        self.descriptor, self.address = descriptor, address

    def __del__(self) -> None:
        os.close(self.descriptor)


class State(msgspec.Struct, frozen=True):
    """A sequence's state as bytes. Each piece has the cells of one tensor, or metadata.

    A file should have piece `i` at `page_offsets[i]` bytes after a page boundary, so that the pages of
    the piece can be mapped into the KV cache. Metadata has the offset ANYWHERE. `file` is the mapped
    file with the pieces; None if they are in memory.
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
    """Make a `State` that consists of one piece, `state`."""
    return State((state,), (ANYWHERE,))
