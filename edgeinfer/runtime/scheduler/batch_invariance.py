"""Bounds within which a batched step is bit-identical to unbatched ones."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.runtime.llama import libedgeinfer, libllama
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.memory_plan import invariant_rows


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Bounds within which a batched step is bit-identical to unbatched ones (decision 022).

    `rows`: tokens in a batch beyond which kernels round differently. `cells`: used cells beyond which
    a single token's attention rounds differently; None for no such bound. `in_order`: attention sums a
    sequence's cells in the order of its positions, wherever free ones were filled.
    """

    rows: int
    cells: int | None
    in_order: bool = True


#: Bounds for llama.cpp's own attention over an f16 cache. It uses another kernel from 64 tokens on, and
#: splits a single token's work among threads from 512 cells on. llama.cpp pads cells to multiples of
#: 256, and 192 cells with 60 rows stay within the first.
_LLAMA_INVARIANCE = BatchInvariance(rows=60, cells=192)
#: Largest head (elements) that native/attention.cpp accepts, and the step its length is a multiple of.
_MOST_HEAD, _HEAD_STEP = 256, 16


def _is_left_to_llama(loaded: LlamaModel) -> bool:
    """Return whether native/attention.cpp declines this model's attention."""
    return any(n > _MOST_HEAD or n % _HEAD_STEP for n in loaded.shape.head_lengths)


def batch_invariance(loaded: LlamaModel) -> BatchInvariance:
    """Return the bounds for the kernels, the attention and the KV cache in use."""
    kernels = libllama.build_info().kernels
    rows = loaded.n_batch if kernels else invariant_rows(loaded.n_batch, loaded.shape.file_type)
    kv_type, flash = (loaded.choices[name].value for name in ("kv_type", "flash_attention"))
    is_ours = flash == "on" and bool(kernels) and not _is_left_to_llama(loaded)
    if kv_type != "f16" or is_ours:
        return BatchInvariance(rows, cells=None, in_order=is_ours)
    return BatchInvariance(min(rows, _LLAMA_INVARIANCE.rows), _LLAMA_INVARIANCE.cells, in_order=False)


def why_irreproducible(loaded: LlamaModel) -> str:
    """Return why the tokens of a request may depend on its batch or the machine; "" if they do not."""
    invariance = batch_invariance(loaded)
    if not libllama.build_info().kernels:
        return "llama.cpp's own kernels serve here, whose bits depend on the batch and the processor"
    if not loaded.supports_truncation:
        return "the model is recurrent: it computes a prompt differently from single tokens"
    if invariance.cells is not None or not invariance.in_order:
        return "llama.cpp's own attention serves this model, whose bits depend on the batch"
    operation = libedgeinfer.dependent_operation()
    if operation:
        return f"llama.cpp computed an operation whose bits depend on the processor ({operation})"
    return ""
