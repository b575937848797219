"""Limits within which the logits of a sequence are bit-identical in a batch and by itself."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.runtime.llama import libedgeinfer, libllama
from edgeinfer.runtime.llama.model import LlamaModel


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Limits within which a batched step is bit-identical to unbatched ones (decision 022).

    Beyond them, results are rounded differently: in a batch of more than `max_tokens` tokens, or with
    more than `max_cells` used cells (None: no limit). `sums_in_order`: attention sums cells in the
    order of positions, so that it does not matter which cells a sequence has.
    """

    max_tokens: int
    max_cells: int | None
    sums_in_order: bool = True


#: Up to these limits, results of llama.cpp's own attention (f16 KV cache) do not depend on the batch. A
#: batch of 64 or more tokens is computed by another kernel. From 512 cells on, several threads share
#: the cells of a token. llama.cpp rounds the number of cells up to a multiple of 256, so 192 used cells
#: and 60 new ones count as 256.
_LLAMA_INVARIANCE = BatchInvariance(max_tokens=60, max_cells=192)
#: native/attention.cpp accepts attention heads of up to 256 elements, in multiples of 16.
_MOST_HEAD, _HEAD_STEP = 256, 16
#: File types (llama_ftype) whose products llama.cpp always computes as dot products of single rows, so
#: that they are batch-invariant: Q4_1, Q5_1, Q3_K, and the small IQ and TQ types.
_DOT_ONLY = frozenset({3, 9, 11, 12, 13, 19, 20, 22, 23, 24, 26, 27, 28, 29, 30, 31, 36, 37})
#: Largest batch (tokens) for file types that are not in _DOT_ONLY: above this size, llama.cpp may
#: compute their products with another kernel.
_DOT_TOKENS = 3


def max_invariant_tokens(n_batch: int, file_type: int) -> int:
    """Return the largest batch (tokens) with which llama.cpp's products are batch-invariant."""
    return n_batch if file_type in _DOT_ONLY else _DOT_TOKENS


def batch_invariance(loaded: LlamaModel) -> BatchInvariance:
    """Return the limits of batch invariance for a loaded model."""
    kernels = libllama.build_info().kernels
    n_batch = loaded.n_batch
    max_tokens = n_batch if kernels else max_invariant_tokens(n_batch, loaded.shape.file_type)
    kv_type, flash = (loaded.choices[name].value for name in ("kv_type", "flash_attention"))
    has_accepted_heads = all(n <= _MOST_HEAD and not n % _HEAD_STEP for n in loaded.shape.head_lengths)
    is_native = flash == "on" and bool(kernels) and has_accepted_heads
    if kv_type != "f16" or is_native:
        return BatchInvariance(max_tokens, max_cells=None, sums_in_order=is_native)
    max_tokens = min(max_tokens, _LLAMA_INVARIANCE.max_tokens)
    return BatchInvariance(max_tokens, _LLAMA_INVARIANCE.max_cells, sums_in_order=False)


def why_irreproducible(loaded: LlamaModel) -> str:
    """Return why answers may depend on the batch or the machine, "" if they do not."""
    invariance = batch_invariance(loaded)
    if not libllama.build_info().kernels:
        return "llama.cpp's own kernels are used; their results depend on the batch and the CPU"
    if not loaded.supports_truncation:
        return "the model is recurrent: it computes a prompt differently from single tokens"
    if invariance.max_cells is not None or not invariance.sums_in_order:
        return "llama.cpp's own attention is used; its results depend on the batch"
    operation = libedgeinfer.dependent_operation()
    if operation:
        return f"llama.cpp computed an operation whose result depends on the CPU ({operation})"
    return ""
