"""Logits and token ids straight from llama.cpp, with a float32 KV cache: what a file holds, and no engine."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp as L
import numpy as np

from edgeinfer.runtime.llama import libllama


@contextlib.contextmanager
def loaded(path: Path, *, vocab_only: bool = False) -> Iterator[object]:
    """Yield the model in a file."""
    libllama.lib()
    parameters = L.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.vocab_only = vocab_only
    model = L.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, libllama.recent_reason()
    try:
        yield model
    finally:
        L.llama_model_free(model)


def _context(model: object) -> object:
    parameters = L.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 128
    parameters.type_k = parameters.type_v = 0
    parameters.flash_attn_type = 0
    parameters.n_threads = parameters.n_threads_batch = 1
    return L.llama_init_from_model(model, parameters)


def read(path: Path, tokens: Sequence[int], *, adapters: dict[Path, float] | None = None) -> np.ndarray:
    """Return the logits of every position, [tokens, vocabulary]."""
    with loaded(path) as model:
        context = _context(model)
        try:
            _set_adapters(model, context, adapters or {})
            decode(context, tokens)
            width = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
            rows = [L.llama_get_logits_ith(context, index) for index in range(len(tokens))]
            return np.array([np.ctypeslib.as_array(row, (width,)) for row in rows])
        finally:
            L.llama_free(context)


def decode(context: object, tokens: Sequence[int], first: int = 0) -> None:
    """Compute tokens at the positions from `first` on, each with its logits."""
    batch = L.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, first + index
        batch.n_seq_id[index] = batch.logits[index] = 1
        batch.seq_id[index][0] = 0
    assert L.llama_decode(context, batch) == 0
    L.llama_batch_free(batch)


def _set_adapters(model: object, context: object, adapters: dict[Path, float]) -> None:
    import ctypes

    if not adapters:
        return
    loaded = [L.llama_adapter_lora_init(model, str(path).encode()) for path in adapters]
    assert all(loaded), libllama.recent_reason()
    pointers = (L.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
    scales = (ctypes.c_float * len(loaded))(*adapters.values())
    assert L.llama_set_adapters_lora(context, pointers, len(loaded), scales) == 0
