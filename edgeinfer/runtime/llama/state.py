"""Save and restore the state of a range of tokens, the contents of a KV block: `SequenceStates`.

llama.cpp saves only whole sequences. So a range is first copied to a scratch sequence id (which sets a
bit per cell) and saved from there. A restore reads the state into the scratch sequence, and copies that
sequence to the end of the target. A state has one piece per tensor, so that pages of a piece can be
mapped into the KV cache (cells.py).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.cells import Copied, StatePiece
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.sequence_state import ANYWHERE, State, as_state

#: Flag of llama.cpp's state functions: save or restore only the recurrent part.
_PARTIAL_ONLY = 1
_BYTES = ctypes.POINTER(ctypes.c_uint8)
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_BEFORE_CACHES, _BEFORE_TENSOR = 8, 12
#: Pieces of a state below this size (bytes) are copied, because mapping them is not faster.
_WORTH_MAPPING = 32 << 10


class SequenceStates:
    """Saves and restores states of a context's sequences. Not thread-safe.

    States pass through the sequence id `scratch`, which no request gets. Methods raise DecodeError.
    """

    def __init__(
        self, context: LlamaContext, scratch: int, *, supports_truncation: bool = True
    ) -> None:
        self._llama = libllama.lib()
        self._context = context
        self._scratch = scratch
        self._supports_truncation = supports_truncation

    def save(
        self,
        seq_id: int,
        start: int,
        stop: int,
        shift: int = 0,
        positions: tuple[int, int] | None = None,
    ) -> State | None:
        """Save the state of tokens [start, stop); None if the context has dropped some of them.

        `positions` are those of `start` and `stop` in the context, which differ from `start` and `stop`
        after pictures with M-RoPE. The state can be mapped into cells [start + shift, stop + shift).
        """
        low, high = positions or (start, stop)
        first_position = self._llama.llama_memory_seq_pos_min(self._context.memory, seq_id)
        if self._supports_truncation and first_position > low:
            return None  # a sliding window has dropped these tokens
        self._clear()
        self._llama.llama_memory_seq_cp(self._context.memory, seq_id, self._scratch, low, high)
        state = self._get_in_pieces(stop - start, start + shift)
        self._clear()
        return state

    def restore(self, seq_id: int, state: State) -> bool:
        """Append a saved state to the sequence `seq_id`; return False if there are too few cells."""
        self._clear()
        is_restored = self._set_pieces(state) or self._set(self._scratch, state.join_pieces(), 0)
        if is_restored:
            self._llama.llama_memory_seq_cp(self._context.memory, self._scratch, seq_id, -1, -1)
        self._clear()
        return is_restored

    def save_checkpoint(self, seq_id: int) -> memoryview | None:
        """Save the recurrent state of `seq_id`, None on failure."""
        return self._get(seq_id, _PARTIAL_ONLY)

    def restore_checkpoint(self, seq_id: int, state: memoryview) -> bool:
        """Restore the recurrent state of `seq_id`; return False on failure."""
        return self._set(seq_id, state, _PARTIAL_ONLY)

    def _clear(self) -> None:
        self._llama.llama_memory_seq_rm(self._context.memory, self._scratch, -1, -1)

    def _get_in_pieces(self, n_tokens: int, cell: int) -> State | None:
        cells = self._context.cells
        if cells.copies is None or not cells.is_all_on_host:
            state = self._get(self._scratch, 0)
            return None if state is None else as_state(state)
        size = self._llama.llama_state_seq_get_size_ext(self._context.pointer, self._scratch, 0)
        buffer = np.empty(size, np.uint8)
        with cells.copies.record(cells.handles, buffer.ctypes.data) as copied:
            done = self._fill(buffer, self._scratch, 0)
        if not done:
            return None
        runs = _runs(copied)
        _sort_by_position(buffer, runs)
        large = [run for run in runs if run.size >= _WORTH_MAPPING]
        return _cut(memoryview(buffer.data), large, n_tokens, cell)

    def _set_pieces(self, state: State) -> bool:
        cells = self._context.cells
        if cells.copies is None:
            return False
        # mmap, because most of the buffer is never written to, and NumPy would request huge pages
        buffer = np.frombuffer(mmap.mmap(-1, state.n_bytes, _PRIVATE), np.uint8)
        pieces: list[StatePiece] = []
        offset = 0
        for piece, page_offset in zip(state.pieces, state.page_offsets, strict=True):
            size = piece.nbytes
            # copies to a device cannot be intercepted: llama.cpp needs these bytes in the buffer
            if page_offset == ANYWHERE or not cells.is_all_on_host:
                buffer[offset : offset + size] = np.frombuffer(piece, np.uint8)
            else:
                pieces.append(StatePiece(offset, size, np.frombuffer(piece, np.uint8).ctypes.data))
            offset += size
        with cells.copies.replace(cells.handles, buffer.ctypes.data, pieces, state.file) as counted:
            done = self._set(self._scratch, memoryview(buffer.data), 0)
        if done and counted.n_bytes == sum(piece.size for piece in pieces):
            return True
        self._clear()
        return False

    def _get(self, seq_id: int, flags: int) -> memoryview | None:
        size = self._llama.llama_state_seq_get_size_ext(self._context.pointer, seq_id, flags)
        state = np.empty(size, np.uint8)
        return memoryview(state.data) if self._fill(state, seq_id, flags) else None

    def _fill(self, state: npt.NDArray[np.uint8], seq_id: int, flags: int) -> bool:
        pointer, size = state.ctypes.data_as(_BYTES), len(state)
        get = self._llama.llama_state_seq_get_data_ext
        return bool(libllama.call(get, self._context.pointer, pointer, size, seq_id, flags) == size)

    def _set(self, seq_id: int, state: memoryview, flags: int) -> bool:
        pointer = np.frombuffer(state, np.uint8).ctypes.data_as(_BYTES)
        size = len(state)
        put = self._llama.llama_state_seq_set_data_ext
        return bool(libllama.call(put, self._context.pointer, pointer, size, seq_id, flags) == size)


def make_states(loaded: LlamaModel, context: LlamaContext) -> SequenceStates:
    scratch = loaded.scratch_seq_id
    return SequenceStates(context, scratch, supports_truncation=loaded.supports_truncation)


def _runs(copied: Sequence[Copied]) -> list[Copied]:
    runs: list[Copied] = []
    for piece in copied:
        last = runs[-1] if runs else None
        if last and last.tensor == piece.tensor and last.at + last.size == piece.at:
            last.size += piece.size
        else:
            runs.append(Copied(piece.at, piece.size, piece.tensor))
    return runs


def _sort_by_position(state: npt.NDArray[np.uint8], runs: Iterable[Copied]) -> None:
    """Sort the cells in a state by position; llama.cpp writes them by index.

    The format: a state begins with a magic number and the sequence id. Before the layers of a cache
    (`llama_kv_cache::state_write`): u32 number of streams, u32 number of cells; for each cell an i32
    position, a u32 1, with M-RoPE i32 x, y and token, and the i32 sequence id; u32 transposed, u32
    number of layers. Before each tensor: i32 type, u64 bytes per cell. Transposed values (without
    flash attention) are not sorted: their attention sums by index.
    """
    run_end = 0
    order = None
    for run in runs:
        if run.at - run_end > _BEFORE_TENSOR:
            header = state[run_end or _BEFORE_CACHES : run.at - _BEFORE_TENSOR].view(np.int32)
            cells = header[2:-2].reshape(header[1], -1)
            # sort by position, and the rows of a picture that share a position by y and x
            order = np.lexsort((*cells[:, 2:4].T, cells[:, 0]))
            if header[-2] or (order[1:] > order[:-1]).all():
                order = None
            else:
                cells[:] = cells[order]
        if order is not None:
            rows = state[run.at : run.at + run.size].reshape(len(order), -1)
            rows[:] = rows[order]
        run_end = run.at + run.size


def _cut(state: memoryview, runs: Iterable[Copied], n_tokens: int, cell: int) -> State:
    """Split a state into one piece per tensor, and the metadata between them.

    The pieces get the page offsets of the cells from index `cell` on.
    """
    pieces: list[memoryview] = []
    page_offsets: list[int] = []
    offset = 0
    for run in runs:
        row = run.size // n_tokens
        pieces += [state[offset : run.at], state[run.at : run.at + run.size]]
        page_offsets += [ANYWHERE, (run.tensor + cell * row) % mmap.PAGESIZE]
        offset = run.at + run.size
    pieces.append(state[offset:])
    page_offsets.append(ANYWHERE)
    return State(tuple(pieces), tuple(page_offsets))
