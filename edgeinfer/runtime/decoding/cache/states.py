"""Parts of a sequence's state as bytes, and back: what a block of the store holds.

llama.cpp writes the state of a whole sequence and knows no range. A scratch sequence is the range: a
part is copied to it, which costs a bit per cell, and written from there; a part that comes back is read
into it and copied behind what the sequence has.
"""

from __future__ import annotations

import ctypes

import numpy as np

from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.active import ActiveContext

#: Only the part of a state that cannot be cut: of recurrent and hybrid models, the recurrent one.
_PARTIAL_ONLY = 1
_BYTES = ctypes.POINTER(ctypes.c_uint8)


class SequenceStates:
    """The states of the active context's sequences. One thread.

    `scratch` is a sequence id that nobody else uses; `can_cut` is False for recurrent and hybrid
    models.
    """

    def __init__(self, active: ActiveContext, scratch: int, *, can_cut: bool = True) -> None:
        self._llama = libllama.lib()
        self._active = active
        self._scratch = scratch
        self._can_cut = can_cut

    def read(self, seq_id: int, start: int, end: int) -> memoryview | None:
        """The state of positions [start, end); None where the context has not all of them."""
        first = self._llama.llama_memory_seq_pos_min(self._active.memory, seq_id)
        if self._can_cut and first > start:
            return None  # cells behind a sliding window may have been taken for others
        self._clear()
        self._llama.llama_memory_seq_cp(self._active.memory, seq_id, self._scratch, start, end)
        state = self._get(self._scratch, 0)
        self._clear()
        return state

    def write(self, seq_id: int, state: memoryview) -> bool:
        """Put a part back where it was, behind what `seq_id` has. False when there was no room."""
        self._clear()
        done = self._set(self._scratch, state, 0)
        if done:
            self._llama.llama_memory_seq_cp(self._active.memory, self._scratch, seq_id, -1, -1)
        self._clear()
        return done

    def read_point(self, seq_id: int) -> memoryview | None:
        """The recurrent state of `seq_id` where it is now."""
        return self._get(seq_id, _PARTIAL_ONLY)

    def write_point(self, seq_id: int, state: memoryview) -> bool:
        """Take the recurrent state of `seq_id` back to a point; what is behind can be cut then."""
        return self._set(seq_id, state, _PARTIAL_ONLY)

    def _clear(self) -> None:
        self._llama.llama_memory_seq_rm(self._active.memory, self._scratch, -1, -1)

    def _get(self, seq_id: int, flags: int) -> memoryview | None:
        size = self._llama.llama_state_seq_get_size_ext(self._active.context, seq_id, flags)
        state = np.empty(size, np.uint8)
        pointer = state.ctypes.data_as(_BYTES)
        get = self._llama.llama_state_seq_get_data_ext
        n = libllama.move_state(get, self._active.context, pointer, size, seq_id, flags)
        return memoryview(state.data) if n == size else None

    def _set(self, seq_id: int, state: memoryview, flags: int) -> bool:
        pointer = np.frombuffer(state, np.uint8).ctypes.data_as(_BYTES)
        size = len(state)
        put = self._llama.llama_state_seq_set_data_ext
        return libllama.move_state(put, self._active.context, pointer, size, seq_id, flags) == size
