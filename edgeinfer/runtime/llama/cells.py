"""The memory of KV cells, and copies between it and a state's bytes (native/cells.cpp).

llama.cpp clears a new KV cache: 0.5 s and a gigabyte of memory per gigabyte, though most cells may
never be used. Returned anonymous memory also reads as zeros (madvise(2)), so buffers are cleared by
returning their pages. That is done for the first clearing only: later, pages may be mapped from a file,
whose content would come back.

ggml has no option for this, nor for copies, so entries of a buffer's function table are replaced. They
are found by probing: an entry counts only if ggml's public function calls the probe. Without one,
ggml's own function stays (decision 082).

The kernel allocates cells' memory when they are first written. llama.cpp's copies take half a
millisecond per megabyte, most of it for the first touch of each page. A page of a cached file can
become a page of cells in a tenth of that time, and takes no memory of this process until it is written
(docs/decisions/096-mapped-cells.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_PROBE_BYTES = 4096
#: Most function-table entries that are read of a buffer type and of a buffer.
TYPE_ENTRIES, BUFFER_ENTRIES = 6, 12


class Buffer(NamedTuple):
    """A ggml buffer: its handle, and the address of its bytes."""

    handle: int
    memory: Range


@contextlib.contextmanager
def sparse_buffers() -> Iterator[list[Buffer]]:
    """During the block, clear new buffers by returning their pages. Yields a list of them, which is
    filled at the end.
    """
    sparse = _find()
    if sparse is None:
        yield []
        return
    with sparse.allocating() as cleared:
        yield cleared


class _SparseBuffers:
    """The two table entries and their replacements. Never freed: buffers keep pointers to them."""

    def __init__(self, ggml: ctypes.CDLL, buffer_type: int, allocate: int, clear: int) -> None:
        self._ggml = ggml
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._type_entries = table(buffer_type, TYPE_ENTRIES)
        self._allocate_entry = allocate
        self._clear_entry = clear
        self._allocate = _ALLOCATE(self._type_entries[allocate])
        self._clear: Any = None
        self._is_allocating = False
        self._own_allocate = _ALLOCATE(self._on_allocate)
        self._own_clear = _CLEAR(self._on_clear)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[list[Buffer]]:
        with replace_entry(self._type_entries, self._allocate_entry, self._own_allocate):
            self._is_allocating = True
            self._cleared: list[Buffer] = []
            try:
                yield self._cleared
            finally:
                self._is_allocating = False

    def _on_allocate(self, buffer_type: int, size: int) -> int | None:
        buffer: int | None = self._allocate(buffer_type, size)
        if buffer and size >= mmap.PAGESIZE:
            entries = table(buffer, BUFFER_ENTRIES)
            self._clear = self._clear or _CLEAR(entries[self._clear_entry])
            entries[self._clear_entry] = ctypes.cast(self._own_clear, Pointer).value
        return buffer

    def _on_clear(self, buffer: int, value: int) -> None:
        original = ctypes.cast(self._clear, Pointer).value
        table(buffer, BUFFER_ENTRIES)[self._clear_entry] = original
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
    if sys.platform != "linux":
        return None
    ggml = libllama.base_library()
    buffer_type = ggml.ggml_backend_cpu_buffer_type()
    buffer = ggml.ggml_backend_buft_alloc_buffer(buffer_type, _PROBE_BYTES)
    try:
        clear = find_entry(
            table(buffer, BUFFER_ENTRIES), _CLEAR, lambda: ggml.ggml_backend_buffer_clear(buffer, 0)
        )
        allocate = find_entry(
            table(buffer_type, TYPE_ENTRIES),
            _ALLOCATE,
            lambda: ggml.ggml_backend_buffer_free(
                ggml.ggml_backend_buft_alloc_buffer(buffer_type, _PROBE_BYTES)
            ),
        )
    finally:
        ggml.ggml_backend_buffer_free(buffer)
    if clear is None or allocate is None:
        return None
    return _SparseBuffers(ggml, buffer_type, allocate, clear)


def table(address: int, length: int) -> Any:
    """View the `length` pointers at `address`, for reading and writing."""
    return (Pointer * length).from_address(address)


def find_entry(entries: Any, kind: Any, call: Callable[[], object]) -> int | None:
    """Find the table entry of ctypes prototype `kind` that `call` uses, or None."""
    seen: list[bool] = []

    def note(*_: object) -> None:
        seen.append(True)

    probe = kind(note)
    for number in range(len(entries)):
        with replace_entry(entries, number, probe):
            call()
        if seen:
            return number
    return None


@contextlib.contextmanager
def replace_entry(entries: Any, number: int, function: Any) -> Iterator[None]:
    """Replace a table entry by the ctypes `function` during the block."""
    before = entries[number]
    entries[number] = ctypes.cast(function, Pointer).value
    try:
        yield
    finally:
        entries[number] = before


_COPY = ctypes.CFUNCTYPE(
    None, Pointer, Pointer, Pointer, ctypes.c_size_t, ctypes.c_size_t
)  # get_tensor and set_tensor of ggml_backend_buffer_i
_TENSOR_BYTES = 4096
_I8 = 24  # GGML_TYPE_I8
#: Most copies that are recorded while one state is saved; a layer has two per run of cells.
_MOST_COPIES = 32768
#: Most mappings of a process if the kernel does not say; and the share of them for cells.
_DEFAULT_MAPPINGS = 65_530
_MAPPINGS_SHARE = 0.75
#: Interval (s) between counts of the mappings; one count takes some 10 ms.
_COUNT_S = 1.0


class Copied(ctypes.Structure):
    """`size` bytes of a state from `at` on are cells of the tensor whose data begin at `tensor`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("at", "size", "tensor")]


class StatePiece(ctypes.Structure):
    """`size` bytes of a state from `at` on lie at address `source`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("at", "size", "source")]


class _Transfer(ctypes.Structure):
    """`Transfer` of native/cells.cpp."""

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


class _InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", Pointer), ("no_alloc", ctypes.c_bool)]


class _Entries(NamedTuple):
    get: int
    set: int


class CellCopies:
    """The library, and the table entries that it replaces. One per process, for all contexts."""

    def __init__(
        self, library: ctypes.CDLL, entries: _Entries, kernels: ctypes.CDLL | None = None
    ) -> None:
        self._library = library
        self._entries = entries
        self._kernels = kernels
        self._written = kernels and ctypes.cast(kernels.edgeinfer_cells_written, ctypes.c_void_p)
        self._copied = (Copied * _MOST_COPIES)()
        self._n_free = 0
        self._counted_at = float("-inf")

    @contextlib.contextmanager
    def out(self, buffers: Sequence[int], state: int) -> Iterator[list[Copied]]:
        """During the block, record llama.cpp's copies from `buffers` to `state`; yield a list that is
        filled at its end.
        """
        noted: list[Copied] = []
        transfer = _Transfer(state=state, copied=self._copied, capacity=_MOST_COPIES)
        with self._at_work(buffers, self._entries.get, "edgeinfer_cells_get", transfer):
            yield noted
        if transfer.n_copied <= _MOST_COPIES:
            noted += self._copied[: transfer.n_copied]

    @contextlib.contextmanager
    def into(
        self, buffers: Sequence[int], state: int, pieces: Sequence[StatePiece], file: MappedFile | None
    ) -> Iterator[_Transfer]:
        """During the block, use `pieces`, in order, as those bytes of the state at address `state`.

        If they lie in `file`, its pages become pages of the cells. Yields the counter of bytes.
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
        with self._at_work(buffers, self._entries.set, "edgeinfer_cells_set", transfer):
            yield transfer
        self._n_free -= 2 * transfer.n_mapped  # each adds a mapping, and splits another one

    @contextlib.contextmanager
    def _at_work(
        self, buffers: Sequence[int], entry: int, name: str, transfer: _Transfer
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in buffers:
                entries = table(handle, BUFFER_ENTRIES)
                stack.enter_context(replace_entry(entries, entry, self._library[name]))
            self._library.edgeinfer_cells(ctypes.byref(transfer))
            yield

    def forget_order(self, memory: Range) -> None:
        """Forget the order in which cells in `memory` were written (native/cell_order.cpp)."""
        if self._kernels:
            self._kernels.edgeinfer_cells_freed(*map(ctypes.c_void_p, memory))

    def _may_map(self, n: int) -> bool:
        """Return whether the kernel allows this process `n` more separate mappings."""
        if self._n_free < 2 * n and time.monotonic() - self._counted_at > _COUNT_S:
            self._counted_at = time.monotonic()
            self._n_free = int(_MAPPINGS_SHARE * _most_mappings()) - sum(1 for _ in areas())
        return self._n_free >= 2 * n


@cache
def find_copies() -> CellCopies | None:
    """Open the library once, if it fits ggml's tables."""
    if sys.platform != "linux":
        return None
    entries = _find_entries(libllama.base_library())
    try:
        library = libllama.own_library("cells")
        library.edgeinfer_cells.argtypes = [Pointer]
        library.edgeinfer_cells.restype = None
        level = libllama.build_info().kernels
        kernels = libllama.own_library(f"kernels-{level}") if level else None
    except OSError:
        return None
    return CellCopies(library, entries, kernels) if entries else None


def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _DEFAULT_MAPPINGS


def _find_entries(ggml: ctypes.CDLL) -> _Entries | None:
    room = ctypes.create_string_buffer(_TENSOR_BYTES)
    ggml.ggml_init.argtypes, ggml.ggml_init.restype = [_InitParams], Pointer
    buffer = ggml.ggml_backend_buft_alloc_buffer(ggml.ggml_backend_cpu_buffer_type(), _TENSOR_BYTES)
    context = ggml.ggml_init(_InitParams(_TENSOR_BYTES, ctypes.addressof(room), True))
    try:
        tensor = ggml.ggml_new_tensor_1d(context, _I8, 1)
        ggml.ggml_backend_tensor_alloc(buffer, tensor, ggml.ggml_backend_buffer_get_base(buffer))
        entries = table(buffer, BUFFER_ENTRIES)
        one_byte = tensor, ctypes.byref(ctypes.c_uint8()), 0, 1
        get = find_entry(entries, _COPY, lambda: ggml.ggml_backend_tensor_get(*one_byte))
        put = find_entry(entries, _COPY, lambda: ggml.ggml_backend_tensor_set(*one_byte))
    finally:
        ggml.ggml_free(context)
        ggml.ggml_backend_buffer_free(buffer)
    return None if get is None or put is None else _Entries(get, put)


#: Bytes returned per call: a gigabyte takes 0.1 to 0.25 s, during which a request waits.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CellMemory:
    """The memory of `n_cells` cells: `buffers` whose pages can be returned.

    `rows` are the bytes of one cell in each tensor of the cache, in their order in the only buffer;
    empty if unknown. `copies` intercepts llama.cpp's copies. `is_all`: no cells are on a device.
    """

    buffers: tuple[Buffer, ...] = ()
    rows: tuple[int, ...] = ()
    n_cells: int = 0
    copies: CellCopies | None = None
    is_all: bool = True

    @property
    def handles(self) -> list[int]:
        return [buffer.handle for buffer in self.buffers]

    def pages(self) -> Iterator[Range]:
        """Yield the complete pages of all buffers, in pieces."""
        for start, stop in (buffer.memory for buffer in self.buffers):
            low = _round_up(start)
            high = stop // mmap.PAGESIZE * mmap.PAGESIZE
            for address in range(low, high, _PIECE_BYTES):
                yield Range(address, min(address + _PIECE_BYTES, high))

    def give_back(self, pages: Iterable[Range] | None = None) -> None:
        """Return `pages`, or all, to the kernel; they become zeros. No sequence may use these cells."""
        for low, high in self.pages() if pages is None else pages:
            map_zeros(low, high)

    def forget_order(self) -> None:
        """Forget the cells' order. Call it before the context and its buffers are freed."""
        if self.copies:
            for buffer in self.buffers:
                self.copies.forget_order(buffer.memory)

    def can_be_pages_of(self, shift: int) -> bool:
        """Return whether cells have the same position in a page as the cells `shift` before them."""
        return bool(self.copies and self.rows) and not any(
            shift * row % mmap.PAGESIZE for row in self.rows
        )

    def populate(self, first: int, stop: int) -> None:
        """Allocate the pages of cells [first, stop) now. Any thread.

        The first write of a page waits 0.3 to 0.5 ms per megabyte for the allocation; another thread
        can do it ahead. A kernel before 5.14 does nothing.
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


#: Memory of cells that are unknown or on a device.
NO_CELLS = CellMemory()


def cell_memory(
    buffers: Sequence[Buffer], rows: Sequence[int], n_cells: int, *, is_all: bool = True
) -> CellMemory:
    """Describe the memory of `buffers`; `rows` count only if they add up to the only buffer's size."""
    size = sum(memory.high - memory.low for _, memory in buffers)
    is_known = len(buffers) == 1 and sum(rows) * n_cells == size
    copies = find_copies() if buffers else None
    return CellMemory(tuple(buffers), tuple(rows) if is_known else (), n_cells, copies, is_all)


def _round_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
