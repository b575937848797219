"""A llama.cpp context, the batches that it decodes, and a flag that aborts a decode."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.llama import libllama, streaming
from edgeinfer.runtime.llama.cells import NO_CELLS, CellMemory
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.row_adapters import (
    MISSED_ADAPTER,
    AdapterRows,
    LoadedAdapter,
    begin_step,
    end_step,
)


class LlamaContext:
    """A llama_context (at `pointer`) and the sequences in its KV cache. Not thread-safe.

    `cells` is the memory of the KV cache. `adapters` are the loaded LoRA adapters by their files'
    stamps (see `AdapterKey`).
    """

    __slots__ = ("adapters", "cells", "memory", "pointer")

    def __init__(self, pointer: Any, cells: CellMemory = NO_CELLS) -> None:
        self.pointer = pointer
        self.memory = L.llama_get_memory(pointer) if pointer else None
        self.cells = cells
        self.adapters: dict[str, LoadedAdapter] = {}

    def replace(self, other: LlamaContext) -> None:
        self.pointer, self.memory = other.pointer, other.memory
        self.cells, self.adapters = other.cells, other.adapters

    @property
    def n_cells(self) -> int:
        return int(L.llama_n_ctx(self.pointer))

    def set_threads(self, n: int) -> None:
        L.llama_set_n_threads(self.pointer, n, n)

    def free(self) -> None:
        """Free the context. Idempotent."""
        if self.pointer:
            self.cells.forget_order()
            with suppress(DecodeError):  # memory of a lost device cannot be freed
                libllama.call(L.llama_free, self.pointer)
            self.pointer = self.memory = None

    def remove(self, seq_id: int, start: int = -1, stop: int = -1) -> bool:
        return bool(L.llama_memory_seq_rm(self.memory, seq_id, start, stop))

    def copy(self, source: int, target: int, stop: int) -> None:
        L.llama_memory_seq_cp(self.memory, source, target, 0, stop)

    def shift(self, seq_id: int, start: int, delta: int) -> None:
        L.llama_memory_seq_add(self.memory, seq_id, start, -1, delta)

    def first_position(self, seq_id: int) -> int:
        return int(L.llama_memory_seq_pos_min(self.memory, seq_id))

    def clear(self, *, zeros: bool = False) -> None:
        """Remove every sequence; with `zeros` also write zeros to the cells."""
        if self.memory:
            L.llama_memory_clear(self.memory, zeros)

    def copy_state_to(self, target: LlamaContext) -> bool:
        """Copy all sequences to `target`; return False if they do not fit. Raises DecodeError."""
        state = np.empty(int(L.llama_state_get_size(self.pointer)), np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = int(L.llama_state_get_data(self.pointer, pointer, len(state)))
        return bool(n and libllama.call(L.llama_state_set_data, target.pointer, pointer, n) == n)

    def logits(self, index: int, n_vocab: int) -> npt.NDArray[np.float32]:
        """Return a view of the logits of the last batch's token `index`: float32[n_vocab].

        The view is valid until the next decode. Raises DecodeError if the token has no logits.
        """
        pointer = L.llama_get_logits_ith(self.pointer, index)
        if not pointer:
            raise DecodeError(f"llama.cpp computed no logits for token {index} of the batch")
        return _floats(pointer, n_vocab)

    def all_logits(self, n_outputs: int, n_vocab: int) -> npt.NDArray[np.float32]:
        """Return a view of all logits of the last batch: float32[n_outputs, n_vocab].

        The view is valid until the next decode. Getting 32 rows one by one would take 0.1 to 0.2 ms.
        """
        if not n_outputs:
            return np.empty((0, n_vocab), np.float32)
        return _floats(L.llama_get_logits(self.pointer), n_outputs * n_vocab).reshape(-1, n_vocab)

    def embedding(self, seq_id: int, width: int) -> npt.NDArray[np.float64]:
        """Return the pooled embedding of a sequence: float64[width]. Raises DecodeError without one."""
        pointer = L.llama_get_embeddings_seq(self.pointer, seq_id)
        if not pointer:
            raise DecodeError(f"llama.cpp has no embedding of sequence {seq_id}")
        return _floats(pointer, width).astype(np.float64)


def _floats(pointer: Any, n: int) -> npt.NDArray[np.float32]:
    row: Any = (ctypes.c_float * n).from_address(ctypes.addressof(pointer.contents))
    return np.frombuffer(row, dtype=np.float32)


_I32 = ctypes.POINTER(ctypes.c_int32)
_F32 = ctypes.POINTER(ctypes.c_float)


class Batch:
    """A batch for llama_decode: `capacity` tokens, `max_outputs` with logits. Not thread-safe."""

    def __init__(
        self, *, capacity: int, max_outputs: int, n_vocab: int, n_seq_max: int, n_cells: int
    ) -> None:
        self.capacity, self.max_outputs = capacity, max_outputs
        self._n_vocab = n_vocab
        self._n_seq_max = n_seq_max
        self._n_cells = n_cells
        self._rows: list[tuple[int, int, int, int]] = []
        self._adapters: list[AdapterRows] = []
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        self._seq_counts = np.ones(capacity, np.int32)
        base = self._seq.ctypes.data
        self._seq_pointers = (_I32 * (capacity + 1))(
            *(ctypes.cast(base + 4 * i, _I32) for i in range(capacity)), _I32()
        )
        self._native = L.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(_I32),
            embd=None,
            pos=self._pos.ctypes.data_as(_I32),
            n_seq_id=self._seq_counts.ctypes.data_as(_I32),
            seq_id=self._seq_pointers,
            logits=self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._pictures: npt.NDArray[np.float32] | None = None
        self._is_causal = True
        self._positions: npt.NDArray[np.int32] | None = None
        self.n_outputs = 0

    @classmethod
    def of(cls, context: LlamaContext, *, max_outputs: int) -> Batch:
        """Make an empty batch, as large as a context accepts."""
        model = L.llama_get_model(context.pointer)
        return cls(
            capacity=L.llama_n_batch(context.pointer),
            max_outputs=max_outputs,
            n_vocab=L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)),
            n_seq_max=L.llama_n_seq_max(context.pointer),
            n_cells=context.n_cells,
        )

    def clear(self) -> None:
        self._rows.clear()
        self._pictures, self._is_causal = None, True
        self._positions = None
        self._adapters.clear()
        self.n_outputs = 0

    @property
    def n_tokens(self) -> int:
        return len(self._rows)

    @property
    def room(self) -> int:
        return self.capacity - self.n_tokens

    def add(
        self, tokens: Sequence[int], pos: int, seq_id: int, *, outputs: int, adapters: AdapterKey = ()
    ) -> None:
        """Add tokens of a sequence from position `pos` on; logits are computed for the last `outputs`.

        Raises DecodeError if the batch contains a picture or is full, or an argument is out of range.
        """
        if self._pictures is not None:
            raise DecodeError("a batch cannot contain both tokens and rows of a picture")
        if tokens and (min(tokens) < 0 or max(tokens) >= self._n_vocab):
            token = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DecodeError(f"token {token} is outside the vocabulary (0 to {self._n_vocab - 1})")
        self._add(tokens, pos, seq_id, outputs, adapters)

    def add_picture(
        self,
        rows: npt.NDArray[np.float32],
        pos: int,
        seq_id: int,
        *,
        outputs: int,
        is_causal: bool,
        positions: npt.NDArray[np.int32] | None = None,
        adapters: AdapterKey = (),
    ) -> None:
        """Add embedding rows of a picture, float32[n_rows, width], to an empty batch.

        `pos`, `seq_id`, `outputs`, `adapters` and the errors are those of `add`. For M-RoPE,
        `positions` is int32[4, n_rows]: time, y and x relative to `pos`, and 0. Without `is_causal`,
        the rows attend to each other in both directions.
        """
        if self.n_tokens:
            raise DecodeError("a batch cannot contain both tokens and rows of a picture")
        self._pictures, self._is_causal = np.ascontiguousarray(rows, np.float32), is_causal
        if positions is not None:
            offsets = np.array([[pos], [pos], [pos], [0]], np.int32)
            self._positions = np.ascontiguousarray((positions + offsets).reshape(-1), np.int32)
        self._add([0] * len(rows), pos, seq_id, outputs, adapters)

    def _add(
        self, tokens: Sequence[int], pos: int, seq_id: int, outputs: int, adapters: AdapterKey
    ) -> None:
        start, silent = self.n_tokens, len(tokens) - outputs
        self._check(len(tokens), pos, seq_id, outputs)
        self._rows += [(t, pos + i, seq_id, i >= silent) for i, t in enumerate(tokens)]
        if adapters:
            self._adapters.append((adapters, (start, len(tokens), self.n_outputs, outputs)))
        self.n_outputs += outputs

    def _check(self, n: int, pos: int, seq_id: int, outputs: int) -> None:
        if not n:
            raise DecodeError(f"no tokens were given for sequence {seq_id}; at least one is needed")
        if n > self.room:
            raise DecodeError(f"{n} tokens do not fit into a batch with room for {self.room}")
        if not 0 <= seq_id < self._n_seq_max:
            raise DecodeError(f"there is no sequence id {seq_id}: ids end at {self._n_seq_max - 1}")
        if pos < 0 or pos + n > self._n_cells:
            raise DecodeError(
                f"{n} tokens at position {pos} exceed the context of {self._n_cells} tokens"
            )
        if not 0 <= outputs <= n:
            raise DecodeError(f"logits of {outputs} tokens are requested, but {n} tokens are added")
        if (n_outputs := self.n_outputs + outputs) > self.max_outputs:
            raise DecodeError(
                f"logits of {n_outputs} tokens are requested; a batch has at most {self.max_outputs}"
            )

    def _write(self) -> None:
        """Fill llama.cpp's arrays with all tokens at once; one by one, each token takes 7 µs."""
        n = self._native.n_tokens = self.n_tokens
        self._token[:n], self._pos[:n], self._seq[:n], self._output[:n] = zip(*self._rows, strict=True)
        rows = self._pictures
        self._native.token = None if rows is not None else self._token.ctypes.data_as(_I32)
        positions = self._pos if self._positions is None else self._positions
        self._native.pos = positions.ctypes.data_as(_I32)
        self._native.embd = rows.ctypes.data_as(_F32) if rows is not None else None

    def decode(self, context: LlamaContext) -> int:
        """Run llama_decode and return its code.

        0: success; 1: no free KV cells; 2: aborted; MISSED_ADAPTER: the kernels lack a LoRA adapter;
        below 0: fatal. Raises DecodeError if streamed weights could not be read.
        """
        self._write()
        step = 0
        if self._adapters:
            step = begin_step(self._adapters, context.adapters, self.n_tokens, self.n_outputs)
        try:
            code = self._run(context.pointer)
        finally:
            is_complete = not step or end_step(step)
        if not (code or is_complete):
            code = MISSED_ADAPTER
        if streaming.active is not None:
            streaming.active.check()
        return code

    def _run(self, pointer: Any) -> int:
        if self._is_causal:
            return libllama.decode(pointer, self._native)
        L.llama_set_causal_attn(pointer, False)
        try:
            return libllama.decode(pointer, self._native)
        finally:
            L.llama_set_causal_attn(pointer, True)


class AbortFlag:
    """Aborts a llama_decode. Only the decode thread may call `install` and `clear`.

    llama.cpp calls a function before each node of its graph, and aborts if the function returns true.
    A Python function would take the GIL thousands of times per step, so libc's `strlen` is called with
    a text: "" to continue, "x" to abort.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._is_final = False
        strlen = ctypes.CDLL(None).strlen
        self._callback = ctypes.cast(strlen, libllama.lib().ggml_abort_callback)

    def install(self, pointer: Any) -> None:
        """Use this flag for the llama_context at `pointer`."""
        libllama.lib().llama_set_abort_callback(
            pointer, self._callback, ctypes.cast(self._text, ctypes.c_void_p)
        )

    def set(self) -> None:
        """Abort the running llama_decode, or the next one, which then returns 2."""
        self._text[0] = b"x"

    def set_for_good(self) -> None:
        """Abort the running llama_decode and every later one."""
        with self._lock:
            self._is_final = True
            self.set()

    def clear(self) -> None:
        with self._lock:
            if not self._is_final:
                self._text[0] = b"\0"
