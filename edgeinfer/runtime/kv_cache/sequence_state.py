"""The state of a sequence as bytes: pieces that are cells of a tensor, and what lies between."""

from __future__ import annotations

import os

import msgspec

#: A piece may begin anywhere in a page.
ANYWHERE = -1


class MappedFile:
    """A file that is mapped from its first byte on, at `address`.

    Its descriptor is this object's, and closed when nobody has this any more.
    """

    def __init__(self, descriptor: int, address: int) -> None:
        self.descriptor, self.address = descriptor, address

    def __del__(self) -> None:
        os.close(self.descriptor)


class State(msgspec.Struct, frozen=True):
    """A sequence state, bytes, in `pieces` that make it up in order.

    `places` say for each where in a page (bytes) it lies best, or ANYWHERE. `file` is what they are
    views of, None for other memory.
    """

    pieces: tuple[memoryview, ...]
    places: tuple[int, ...]
    file: MappedFile | None = None

    @property
    def n_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """What the header says of it."""
        sizes = (piece.nbytes for piece in self.pieces)
        return tuple(zip(sizes, self.places, strict=True))

    def joined(self) -> memoryview:
        """Its bytes in one place."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))


def whole(state: memoryview) -> State:
    """A state in one piece, which may lie anywhere."""
    return State((state,), (ANYWHERE,))
