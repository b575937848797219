"""Make an importance matrix: `python -m` this, MODEL TEXT TARGET SKIPPED.

The model prefills the text in windows, without its first SKIPPED tokens if the rest is long enough. For
every matrix of its layers the squares of its inputs are summed by column. TARGET is written in
llama.cpp's GGUF form. It writes `{"event": "progress", "done", "total"}` lines, then `{"event": "done",
"n_tokens", "n_tensors"}`, or `{"event": "error", "message"}`.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from edgeinfer.errors import DecodeError, UsageError
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.helpers import decode, run, say, scoring_params
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.model import make_context
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import open_model

#: A window is decoded in batches: every position's logits are wanted, or llama.cpp computes the last
#: layer for the last position alone.
_WINDOW_TOKENS = 512
_BATCH_TOKENS = 128
_LEAST_TOKENS = 256


class _Tensor(ctypes.Structure):
    """ggml's tensor (ggml.h)."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


class Importance:
    """Sums of squares, float32[n_experts, n_columns], and rows, float32[n_experts], by tensor."""

    def __init__(self) -> None:
        self.sums: dict[str, npt.NDArray[np.float32]] = {}
        self.counts: dict[str, npt.NDArray[np.float32]] = {}
        self.error: BaseException | None = None
        #: llama.cpp keeps the pointer alone.
        self.callback = L.ggml_backend_sched_eval_callback(self._on_node)
        self._describe = libllama.base_library().ggml_op_desc

    def _on_node(self, address: int, asks: bool, _data: object) -> bool:
        """Select matrix products first, and record their inputs once they are computed."""
        node = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
        kind = self._describe(address)
        if kind not in (b"MUL_MAT", b"MUL_MAT_ID"):
            return not asks
        weights, inputs = node.src[0].contents, node.src[1].contents
        if not weights.name.startswith(b"blk.") or inputs.type != L.GGML_TYPE_F32:
            return not asks
        if asks or self.error is not None:
            return True
        try:
            ids = node.src[2].contents if kind == b"MUL_MAT_ID" else None
            self._note(weights.name.decode(), int(weights.ne[2]), inputs, ids)
        except Exception as error:  # noqa: BLE001  a callback of C: raised where the batch was computed
            self.error = error
        return True

    def _note(self, name: str, n_experts: int, inputs: _Tensor, ids: _Tensor | None) -> None:
        rows = _view(inputs, ctypes.c_float)
        n_experts = n_experts if ids is not None else 1
        sums = self.sums.setdefault(name, np.zeros((n_experts, rows.shape[-1]), np.float32))
        counts = self.counts.setdefault(name, np.zeros(n_experts, np.float32))
        if ids is None:
            flat = rows.reshape(-1, rows.shape[-1])
            sums[0] += np.einsum("ij,ij->j", flat, flat)
            counts[0] += len(flat)
            return
        chosen = _view(ids, ctypes.c_int32)[0, 0]  # [n_tokens, n_used]
        tokens, places = np.indices(chosen.shape)
        taken = rows[0][tokens, places % rows.shape[2]]  # [n_tokens, n_used, n_columns]
        for expert in np.unique(chosen):
            its = taken[chosen == expert]
            sums[expert] += np.einsum("ij,ij->j", its, its)
            counts[expert] += len(its)


def _view(tensor: _Tensor, kind: Any) -> npt.NDArray[Any]:
    first = ctypes.cast(tensor.data, ctypes.POINTER(kind)).contents
    flat = np.ctypeslib.as_array(ctypes.pointer(first), shape=(1,))
    return np.lib.stride_tricks.as_strided(
        flat, shape=tuple(tensor.ne)[::-1], strides=tuple(tensor.nb)[::-1], writeable=False
    )


def weigh(argv: list[str]) -> dict[str, int]:
    """Process the text and write the matrix. Raises ModelLoadError, UsageError, DecodeError."""
    model = open_model((argv[0],))
    vocab = Vocab(model)
    tokens = vocab.tokenize(Path(argv[1]).read_text("utf-8", "replace"), add_special=False)
    skipped = int(argv[3])
    if len(tokens) >= skipped + _LEAST_TOKENS:
        tokens = tokens[skipped:]
    if len(tokens) < _LEAST_TOKENS:
        raise UsageError(f"the text has {len(tokens)} tokens, fewer than {_LEAST_TOKENS}")
    found = Importance()
    params = scoring_params(_WINDOW_TOKENS, _BATCH_TOKENS)
    params.cb_eval = found.callback
    _read(ActiveContext(make_context(model, params)[0]), vocab, tokens, found)
    _write(Path(argv[2]), found, Path(argv[1]).name, len(tokens))
    return {"n_tokens": len(tokens), "n_tensors": len(found.sums)}


def _read(active: ActiveContext, vocab: Vocab, tokens: list[int], found: Importance) -> None:
    batch = Batch.of(active, max_outputs=_BATCH_TOKENS)
    begin = [vocab.bos] if vocab.adds_bos else []
    step = _WINDOW_TOKENS - len(begin)
    for start in range(0, len(tokens), step):
        window = begin + tokens[start : start + step]
        active.clear(zeros=True)
        for at in range(0, len(window), _BATCH_TOKENS):
            decode(active, batch, window[at : at + _BATCH_TOKENS], at)
            if found.error is not None:
                raise DecodeError(f"what the model computes cannot be read: {found.error}")
        say(event="progress", done=min(start + step, len(tokens)), total=len(tokens))


def _write(target: Path, found: Importance, text: str, n_tokens: int) -> None:
    writer = gguf.GGUFWriter(target, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", [text])
    writer.add_uint32("imatrix.chunk_count", -(-n_tokens // _WINDOW_TOKENS))
    writer.add_uint32("imatrix.chunk_size", _WINDOW_TOKENS)
    for name, sums in found.sums.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", found.counts[name][:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(run(weigh))
