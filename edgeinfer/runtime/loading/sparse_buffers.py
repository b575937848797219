"""Large CPU buffers of llama.cpp that are cleared by giving their pages back instead of writing zeros.

llama.cpp clears a KV cache when it makes it: 0.5 s and a gigabyte of memory for each gigabyte, though
most cells may never be used. Anonymous memory that was given back reads as zeros as well (madvise(2)).

ggml has no option for this. Each of its buffers begins with a table of functions, and one of them
clears; which one is found by trying: an entry counts only when ggml's public function calls what was
put there. Where none is found, buffers are cleared as ever. Decision 082.

Only the first clearing is done so. Later parts of a buffer may be mapped from a snapshot's file, whose
content would come back.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

from edgeinfer.runtime import libllama
from edgeinfer.runtime.loading.mappings import DONTNEED, LARGE_BYTES, Range

_Pointer = ctypes.c_void_p
_ALLOCATE = ctypes.CFUNCTYPE(_Pointer, _Pointer, ctypes.c_size_t)
_CLEAR = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_uint8)
#: Functions at the beginning of a buffer type and of a buffer, at most.
_TYPE_ENTRIES, _BUFFER_ENTRIES = 6, 12
_PROBE_BYTES = 4096

_found: list[_SparseBuffers | None] = []


@contextlib.contextmanager
def sparse_buffers() -> Iterator[list[Range]]:
    """Let large buffers that are allocated while the block runs be cleared by giving pages back.

    Yields a list of those that were; it is whole when the block ends.
    """
    if not _found:
        _found.append(_find() if sys.platform == "linux" else None)
    sparse = _found[0]
    if sparse is None:
        yield []
        return
    with sparse.allocating() as cleared:
        yield cleared


class _SparseBuffers:
    """The two table entries, by number, and the functions that take their places. They live as long as
    the process: buffers keep pointers to them.
    """

    def __init__(self, ggml: ctypes.CDLL, buffer_type: int, allocate: int, clear: int) -> None:
        self._ggml = ggml
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._type_entries = _table(buffer_type, _TYPE_ENTRIES)
        self._allocate_entry = allocate
        self._clear_entry = clear
        self._allocate = _ALLOCATE(self._type_entries[allocate])
        self._clear: Any = None
        self._is_allocating = False
        self._own_allocate = _ALLOCATE(self._on_allocate)
        self._own_clear = _CLEAR(self._on_clear)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[list[Range]]:
        with _replaced(self._type_entries, self._allocate_entry, self._own_allocate):
            self._is_allocating = True
            self._cleared: list[Range] = []
            try:
                yield self._cleared
            finally:
                self._is_allocating = False

    def _on_allocate(self, buffer_type: int, size: int) -> int | None:
        buffer: int | None = self._allocate(buffer_type, size)
        if buffer and size >= LARGE_BYTES:
            entries = _table(buffer, _BUFFER_ENTRIES)
            self._clear = self._clear or _CLEAR(entries[self._clear_entry])
            entries[self._clear_entry] = ctypes.cast(self._own_clear, _Pointer).value
        return buffer

    def _on_clear(self, buffer: int, value: int) -> None:
        original = ctypes.cast(self._clear, _Pointer).value
        _table(buffer, _BUFFER_ENTRIES)[self._clear_entry] = original
        start = self._ggml.ggml_backend_buffer_get_base(buffer)
        end = start + self._ggml.ggml_backend_buffer_get_size(buffer)
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = end // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(high - low)
        is_first = self._is_allocating and not value
        if not is_first or self._libc.madvise(_Pointer(low), size, DONTNEED):
            self._clear(buffer, value)
            return
        ctypes.memset(start, 0, low - start)
        ctypes.memset(high, 0, end - high)
        self._cleared.append(Range(start, end))


def _find() -> _SparseBuffers | None:
    ggml = libllama.base_library()
    buffer_type = ggml.ggml_backend_cpu_buffer_type()
    buffer = ggml.ggml_backend_buft_alloc_buffer(buffer_type, _PROBE_BYTES)
    try:
        clear = _entry(
            _table(buffer, _BUFFER_ENTRIES), _CLEAR, lambda: ggml.ggml_backend_buffer_clear(buffer, 0)
        )
        allocate = _entry(
            _table(buffer_type, _TYPE_ENTRIES),
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


def _entry(entries: Any, kind: Any, call: Callable[[], object]) -> int | None:
    """The number of the entry that `call` goes through; None when it goes through none."""
    seen: list[bool] = []

    def note(*_: object) -> None:
        seen.append(True)

    probe = kind(note)
    for number in range(len(entries)):
        with _replaced(entries, number, probe):
            call()
        if seen:
            return number
    return None


@contextlib.contextmanager
def _replaced(entries: Any, number: int, function: Any) -> Iterator[None]:
    before = entries[number]
    entries[number] = ctypes.cast(function, _Pointer).value
    try:
        yield
    finally:
        entries[number] = before


def _table(address: int, length: int) -> Any:
    return (_Pointer * length).from_address(address)
