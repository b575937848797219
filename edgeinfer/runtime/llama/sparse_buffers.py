"""Clear CPU buffers of llama.cpp by returning their pages instead of writing zeros.

llama.cpp clears a KV cache when it makes it: 0.5 s and a gigabyte of memory for each gigabyte, though
most cells may never be used. Returned anonymous memory reads as zeros as well (madvise(2)).

ggml has no option for this: the clearing entry of a buffer's function table is replaced, for the first
clearing only: later, parts of a buffer may be mapped from a file, whose content would come back. The
entry is found by probing: one counts only if ggml's public function calls the probe, and without one
ggml's own function stays (decision 082).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.mappings import DONTNEED, Range

Pointer = ctypes.c_void_p
_ALLOCATE = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.c_size_t)
_CLEAR = ctypes.CFUNCTYPE(None, Pointer, ctypes.c_uint8)
_PROBE_BYTES = 4096
#: Entries at the beginning of a buffer type and of a buffer, at most.
TYPE_ENTRIES, BUFFER_ENTRIES = 6, 12


class Buffer(NamedTuple):
    """A buffer of ggml's: its handle, and where its bytes lie."""

    handle: int
    memory: Range


@contextlib.contextmanager
def sparse_buffers() -> Iterator[list[Buffer]]:
    """Clear buffers made meanwhile by returning pages; yields them, at the end."""
    sparse = _find()
    if sparse is None:
        yield []
        return
    with sparse.allocating() as cleared:
        yield cleared


class _SparseBuffers:
    """The two table entries and their replacements; never freed: buffers keep pointers to them."""

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
        with replaced(self._type_entries, self._allocate_entry, self._own_allocate):
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
        end = start + self._ggml.ggml_backend_buffer_get_size(buffer)
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = end // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(high - low)
        is_first = self._is_allocating and not value
        if not is_first or self._libc.madvise(Pointer(low), size, DONTNEED):
            self._clear(buffer, value)
            return
        ctypes.memset(start, 0, low - start)
        ctypes.memset(high, 0, end - high)
        self._cleared.append(Buffer(buffer, Range(start, end)))


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
    """Find the entry that `call`, of ctypes prototype `kind`, goes through, or None."""
    seen: list[bool] = []

    def note(*_: object) -> None:
        seen.append(True)

    probe = kind(note)
    for number in range(len(entries)):
        with replaced(entries, number, probe):
            call()
        if seen:
            return number
    return None


@contextlib.contextmanager
def replaced(entries: Any, number: int, function: Any) -> Iterator[None]:
    """Put `function`, of ctypes, in an entry's place during the block."""
    before = entries[number]
    entries[number] = ctypes.cast(function, Pointer).value
    try:
        yield
    finally:
        entries[number] = before
