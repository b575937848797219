"""The memory of KV cells: clear it without touching it, and fill it without copying.

Clearing: llama.cpp writes zeros to a new KV cache, which takes 0.5 s and a gigabyte of memory per
gigabyte, though most cells may never be used. `sparse_buffers` gives the pages back to the kernel
instead (madvise(2)); they read as zeros (docs/decisions/082).

Filling: llama.cpp copies a restored state into the cells, which takes half a millisecond per megabyte,
most of it for the first write to each page. `CellCopies` maps pages of the block's file in place of the
cells' pages instead, in a tenth of the time, and without memory until they are written to
(docs/decisions/096-mapped-cells.md, native/cells.cpp).

ggml has no options for either, so this module replaces function pointers of ggml's buffers. They are in
private structs of ggml-backend-impl.h: with another version of llama.cpp, they are not replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.mappings import DONTNEED, POPULATE_WRITE, Range, advise, areas, map_zeros
from edgeinfer.runtime.sequence_state import MappedFile

Pointer = ctypes.c_void_p
_ALLOCATE = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.c_size_t)
_CLEAR = ctypes.CFUNCTYPE(None, Pointer, ctypes.c_uint8)


class _TypeFunctions(ctypes.Structure):
    """The struct ggml_backend_buffer_type_i, with which a ggml_backend_buffer_type begins."""

    _names = "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host"
    _fields_ = tuple((name, Pointer) for name in _names.split())


class _BufferFunctions(ctypes.Structure):
    """The struct ggml_backend_buffer_i, with which a ggml_backend_buffer begins."""

    _names = """free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d
        get_tensor_2d cpy_tensor clear reset"""
    _fields_ = tuple((name, Pointer) for name in _names.split())


class Buffer(NamedTuple):
    """A ggml buffer: ggml's pointer to it, and the addresses of its bytes."""

    handle: int
    memory: Range


def sparse_buffers() -> contextlib.AbstractContextManager[list[Buffer]]:
    """In the `with` block, let new ggml buffers take no memory until they are written to.

    Yields a list of these buffers. The list stays empty if ggml's functions cannot be replaced.
    """
    sparse = _find()
    return contextlib.nullcontext(list[Buffer]()) if sparse is None else sparse.allocating()


class _SparseBuffers:
    """Replaces ggml's allocate and clear functions. Never freed, because buffers point to it."""

    def __init__(self) -> None:
        self._ggml = libllama.base_library()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._type = _TypeFunctions.from_address(self._ggml.ggml_backend_cpu_buffer_type())
        self._allocate = _ALLOCATE(self._type.alloc_buffer)
        self._clear: Any = None
        self._is_allocating = False
        self._own_allocate = _ALLOCATE(self._on_allocate)
        self._own_clear = _CLEAR(self._on_clear)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[list[Buffer]]:
        with replace_function(self._type, "alloc_buffer", self._own_allocate):
            self._is_allocating = True
            self._cleared: list[Buffer] = []
            try:
                yield self._cleared
            finally:
                self._is_allocating = False

    def _on_allocate(self, buffer_type: int, size: int) -> int | None:
        buffer: int | None = self._allocate(buffer_type, size)
        if buffer and size >= mmap.PAGESIZE:
            functions = _BufferFunctions.from_address(buffer)
            self._clear = self._clear or _CLEAR(functions.clear)
            functions.clear = ctypes.cast(self._own_clear, Pointer).value
        return buffer

    def _on_clear(self, buffer: int, value: int) -> None:
        _BufferFunctions.from_address(buffer).clear = ctypes.cast(self._clear, Pointer).value
        start = self._ggml.ggml_backend_buffer_get_base(buffer)
        stop = start + self._ggml.ggml_backend_buffer_get_size(buffer)
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = stop // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(high - low)
        is_first = self._is_allocating and not value
        if not is_first or self._libc.madvise(Pointer(low), size, DONTNEED):
            self._clear(buffer, value)
            return
        ctypes.memset(start, 0, low - start)
        ctypes.memset(high, 0, stop - high)
        self._cleared.append(Buffer(buffer, Range(start, stop)))


@cache
def _find() -> _SparseBuffers | None:
    return _SparseBuffers() if sys.platform == "linux" and libllama.is_expected_version() else None


@contextlib.contextmanager
def replace_function(functions: ctypes.Structure, name: str, function: Any) -> Iterator[None]:
    """Replace a pointer in a struct of functions by the ctypes `function` during the block."""
    before = getattr(functions, name)
    setattr(functions, name, ctypes.cast(function, Pointer).value)
    try:
        yield
    finally:
        setattr(functions, name, before)


#: Maximum number of llama.cpp's copies that are recorded while a sequence's state is saved. llama.cpp
#: copies the keys and the values of each layer separately, and each range of adjacent cells.
_MOST_COPIES = 32768
#: Maximum number of a process's memory mappings, if the kernel reports none.
_DEFAULT_MAPPINGS = 65_530
#: If more than this share of the process's allowed memory mappings is in use, cells are copied from a
#: file and not mapped.
_MAPPINGS_SHARE = 0.75
#: Minimum interval (s) between two counts of the mappings. A count takes 10 ms.
_COUNT_S = 1.0


class Copied(ctypes.Structure):
    """Bytes [at, at + size) of a state, copied from the tensor whose data begin at address `tensor`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("at", "size", "tensor")]


class StatePiece(ctypes.Structure):
    """Bytes [at, at + size) of a state, which are stored at address `source`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("at", "size", "source")]


class _Transfer(ctypes.Structure):
    """The struct `Transfer` of native/cells.cpp."""

    _fields_ = [
        ("state", ctypes.c_uint64),
        ("copied", ctypes.POINTER(Copied)),
        ("n_copied", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("pieces", ctypes.POINTER(StatePiece)),
        ("n_pieces", ctypes.c_uint64),
        ("page", ctypes.c_uint64),
        ("mapping", ctypes.c_uint64),
        ("file", ctypes.c_int64),
        ("n_bytes", ctypes.c_uint64),
        ("n_mapped", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
    ]


class CellCopies:
    """Intercepts llama.cpp's copies between KV cells and saved states. One per process.

    `record` finds where a state has the bytes of each tensor. `replace` can map pages of a file into
    the cells, which is faster than copying a state.
    """

    def __init__(self, library: ctypes.CDLL, kernels: ctypes.CDLL | None = None) -> None:
        self._library, self._kernels = library, kernels
        self._written = kernels and ctypes.cast(kernels.edgeinfer_cells_written, ctypes.c_void_p)
        self._copied = (Copied * _MOST_COPIES)()
        self._n_free = 0
        self._counted_at = float("-inf")

    @contextlib.contextmanager
    def record(self, buffers: Sequence[int], state: int) -> Iterator[list[Copied]]:
        """Record llama.cpp's copies from KV cells to the state at address `state`.

        `buffers` are ggml's pointers to the cells' buffers. Yields a list that is filled at the end of
        the `with` block; it stays empty if there were too many copies.
        """
        noted: list[Copied] = []
        transfer = _Transfer(state=state, copied=self._copied, capacity=_MOST_COPIES)
        with self._at_work(buffers, "get_tensor", "edgeinfer_cells_get", transfer):
            yield noted
        if transfer.n_copied <= _MOST_COPIES:
            noted += self._copied[: transfer.n_copied]

    @contextlib.contextmanager
    def replace(
        self, buffers: Sequence[int], state: int, pieces: Sequence[StatePiece], file: MappedFile | None
    ) -> Iterator[_Transfer]:
        """During the `with` block, let llama.cpp read `pieces` instead of the state at address `state`.

        `buffers` are ggml's pointers to the cells' buffers. If the pieces are in a `file`, its pages
        are mapped into the cells if possible. `n_bytes` of the yielded struct is the size of the
        pieces that llama.cpp has read.
        """
        can_map = file is not None and self._may_map(len(pieces))
        transfer = _Transfer(
            state=state,
            pieces=(StatePiece * len(pieces))(*pieces),
            n_pieces=len(pieces),
            page=mmap.PAGESIZE,
            mapping=file.address if file else 0,
            file=file.descriptor if file and can_map else -1,
            written=self._written,
        )
        with self._at_work(buffers, "set_tensor", "edgeinfer_cells_set", transfer):
            yield transfer
        self._n_free -= 2 * transfer.n_mapped  # a mapping inside another one splits it in two

    @contextlib.contextmanager
    def _at_work(
        self, buffers: Sequence[int], replaced: str, name: str, transfer: _Transfer
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in buffers:
                functions = _BufferFunctions.from_address(handle)
                stack.enter_context(replace_function(functions, replaced, self._library[name]))
            self._library.edgeinfer_cells(ctypes.byref(transfer))
            yield

    def forget_order(self, memory: Range) -> None:
        """Delete the recorded order in which the cells at these addresses were written.

        Attention sums the cells in this order (native/cell_order.cpp).
        """
        if self._kernels:
            self._kernels.edgeinfer_cells_freed(*map(ctypes.c_void_p, memory))

    def _may_map(self, n: int) -> bool:
        """Return whether the kernel allows this process to map `n` more ranges of pages."""
        if self._n_free < 2 * n and time.monotonic() - self._counted_at > _COUNT_S:
            self._counted_at = time.monotonic()
            self._n_free = int(_MAPPINGS_SHARE * _most_mappings()) - sum(1 for _ in areas())
        return self._n_free >= 2 * n


@cache
def find_copies() -> CellCopies | None:
    """Return the interceptor of copies, None if the library is missing or for another llama.cpp."""
    if sys.platform != "linux":
        return None
    try:
        library = libllama.own_library("cells")
        library.edgeinfer_cells.argtypes = [Pointer]
        library.edgeinfer_cells.restype = None
        level = libllama.build_info().kernels
        kernels = libllama.own_library(f"kernels-{level}") if level else None
    except OSError:
        return None
    return CellCopies(library, kernels)


def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _DEFAULT_MAPPINGS


#: Bytes given back to the kernel per call. A request that arrives meanwhile waits for the call, which
#: would take 0.1 to 0.25 s for a gigabyte.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CellMemory:
    """The memory of a KV cache's `n_cells` cells: ggml's `buffers` in host memory.

    `rows` are the sizes (bytes) of a cell in each tensor, in the buffer's order; () if unknown.
    `copies` is None if copies cannot be intercepted. `is_all_on_host`: no cells are on a device.
    """

    buffers: tuple[Buffer, ...] = ()
    rows: tuple[int, ...] = ()
    n_cells: int = 0
    copies: CellCopies | None = None
    is_all_on_host: bool = True

    @property
    def handles(self) -> list[int]:
        return [buffer.handle for buffer in self.buffers]

    def pages(self) -> Iterator[Range]:
        """Yield the pages of all buffers, 256 MiB at a time."""
        for start, stop in (buffer.memory for buffer in self.buffers):
            low = _round_up(start)
            high = stop // mmap.PAGESIZE * mmap.PAGESIZE
            for address in range(low, high, _PIECE_BYTES):
                yield Range(address, min(address + _PIECE_BYTES, high))

    def release_pages(self, pages: Iterable[Range] | None = None) -> None:
        """Give `pages` (by default all) back to the kernel. Their cells become zeros."""
        for low, high in self.pages() if pages is None else pages:
            map_zeros(low, high)

    def forget_order(self) -> None:
        """Delete the recorded order of writes to the cells. Call this before the context is freed."""
        if self.copies:
            for buffer in self.buffers:
                self.copies.forget_order(buffer.memory)

    def is_page_aligned(self, shift: int) -> bool:
        """Return whether `shift` cells are whole pages in each tensor, so that pages can be mapped."""
        return bool(self.copies and self.rows) and not any(
            shift * row % mmap.PAGESIZE for row in self.rows
        )

    def populate(self, first: int, stop: int) -> None:
        """Have the kernel allocate the pages of cells [first, stop) now. Thread-safe.

        Otherwise the decode thread waits for the kernel at the first write to each page (0.3 to 0.5 ms
        per megabyte). Does nothing before Linux 5.14.
        """
        advise(self._of_cells(first, min(stop, self.n_cells)), POPULATE_WRITE)

    def _of_cells(self, first: int, stop: int) -> Iterator[Range]:
        memory = self.buffers[0].memory if self.buffers else Range(0, 0)
        address = memory.low
        for row in self.rows:
            low = (address + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
            high = _round_up(address + stop * row)
            yield Range(low, min(high, memory.high // mmap.PAGESIZE * mmap.PAGESIZE))
            address += self.n_cells * row


#: The memory of a KV cache that is unknown or on a device.
NO_CELLS = CellMemory()


def cell_memory(
    buffers: Sequence[Buffer], rows: Sequence[int], n_cells: int, *, is_all_on_host: bool = True
) -> CellMemory:
    """Describe a KV cache by the fields of `CellMemory`.

    `rows` are ignored unless there is one buffer, and `n_cells` cells with these rows fill it.
    """
    size = sum(memory.high - memory.low for _, memory in buffers)
    is_known = len(buffers) == 1 and sum(rows) * n_cells == size
    copies = find_copies() if buffers else None
    return CellMemory(tuple(buffers), tuple(rows) if is_known else (), n_cells, copies, is_all_on_host)


def _round_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
