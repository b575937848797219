"""The memory that the cells of a KV cache lie in: the kernel gives it when it is first written."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.runtime.loading.mappings import POPULATE_WRITE, Range, advise

#: Giving back a gigabyte takes 0.1 to 0.25 s, and whoever asks meanwhile waits for it.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CellMemory:
    """Where the `n_cells` cells lie: `ranges`, as far as their pages can be given back.

    `rows` are the bytes of one cell in each tensor of the cache, in their order in the one range; empty
    where that is not known.
    """

    ranges: tuple[Range, ...] = ()
    rows: tuple[int, ...] = ()
    n_cells: int = 0

    def pages(self) -> Iterator[Range]:
        """Whole pages of all ranges, in pieces."""
        for start, end in self.ranges:
            low = _round_up(start)
            high = end // mmap.PAGESIZE * mmap.PAGESIZE
            for at in range(low, high, _PIECE_BYTES):
                yield Range(at, min(at + _PIECE_BYTES, high))

    def populate(self, first: int, end: int) -> None:
        """Have the kernel give the pages of cells [first, end) now. Any thread.

        Who writes a page that was never written waits 0.3 to 0.5 ms a megabyte for it; another thread
        can do that ahead. A kernel before 5.14 does not know how, and nothing happens.
        """
        advise(self._of_cells(first, min(end, self.n_cells)), POPULATE_WRITE)

    def _of_cells(self, first: int, end: int) -> Iterator[Range]:
        at = self.ranges[0].low if self.ranges else 0
        for row in self.rows:
            low = (at + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
            high = _round_up(at + end * row)
            yield Range(low, min(high, self.ranges[0].high // mmap.PAGESIZE * mmap.PAGESIZE))
            at += self.n_cells * row


#: Of a context whose cells are unknown, or not this process's own memory.
NO_CELLS = CellMemory()


def cell_memory(ranges: Sequence[Range], rows: Sequence[int], n_cells: int) -> CellMemory:
    """The memory in `ranges`; its `rows` are believed where they add up to the one range."""
    size = sum(high - low for low, high in ranges)
    is_known = len(ranges) == 1 and sum(rows) * n_cells == size
    return CellMemory(tuple(ranges), tuple(rows) if is_known else (), n_cells)


def _round_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
