"""The memory that the cells of a KV cache lie in: the kernel gives it when it is first written."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.runtime.loading.cell_copies import CellCopies, find_copies
from edgeinfer.runtime.loading.mappings import POPULATE_WRITE, Range, advise, map_zeros
from edgeinfer.runtime.loading.sparse_buffers import Buffer

#: Giving back a gigabyte takes 0.1 to 0.25 s, and whoever asks meanwhile waits for it.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CellMemory:
    """Where the `n_cells` cells lie: `buffers`, as far as their pages can be given back.

    `rows` are the bytes of one cell in each tensor of the cache, in their order in the one buffer;
    empty where that is not known. `copies` sees what llama.cpp copies, and does it otherwise.
    """

    buffers: tuple[Buffer, ...] = ()
    rows: tuple[int, ...] = ()
    n_cells: int = 0
    copies: CellCopies | None = None

    @property
    def handles(self) -> list[int]:
        """ggml's handles of the buffers."""
        return [buffer.handle for buffer in self.buffers]

    def pages(self) -> Iterator[Range]:
        """Whole pages of all buffers, in pieces."""
        for start, end in (buffer.memory for buffer in self.buffers):
            low = _round_up(start)
            high = end // mmap.PAGESIZE * mmap.PAGESIZE
            for at in range(low, high, _PIECE_BYTES):
                yield Range(at, min(at + _PIECE_BYTES, high))

    def give_back(self, pages: Iterable[Range] | None = None) -> None:
        """Give `pages`, or all, back to the kernel: zeros then. No sequence may have cells in them."""
        for low, high in self.pages() if pages is None else pages:
            map_zeros(low, high)

    def can_be_pages_of(self, shift: int) -> bool:
        """Whether cells lie in a page as those that are `shift` cells before them do."""
        return bool(self.copies and self.rows) and not any(
            shift * row % mmap.PAGESIZE for row in self.rows
        )

    def populate(self, first: int, end: int) -> None:
        """Have the kernel give the pages of cells [first, end) now. Any thread.

        Who writes a page that was never written waits 0.3 to 0.5 ms a megabyte for it; another thread
        can do that ahead. A kernel before 5.14 does not know how, and nothing happens.
        """
        advise(self._of_cells(first, min(end, self.n_cells)), POPULATE_WRITE)

    def _of_cells(self, first: int, end: int) -> Iterator[Range]:
        memory = self.buffers[0].memory if self.buffers else Range(0, 0)
        at = memory.low
        for row in self.rows:
            low = (at + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
            high = _round_up(at + end * row)
            yield Range(low, min(high, memory.high // mmap.PAGESIZE * mmap.PAGESIZE))
            at += self.n_cells * row


#: Of a context whose cells are unknown, or not this process's own memory.
NO_CELLS = CellMemory()


def cell_memory(buffers: Sequence[Buffer], rows: Sequence[int], n_cells: int) -> CellMemory:
    """The memory of `buffers`; its `rows` are believed where they add up to the one buffer."""
    size = sum(memory.high - memory.low for _, memory in buffers)
    is_known = len(buffers) == 1 and sum(rows) * n_cells == size
    copies = find_copies() if buffers else None
    return CellMemory(tuple(buffers), tuple(rows) if is_known else (), n_cells, copies)


def _round_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
