"""Measure how fast a small model is read and written here: `python -m` this, MODEL COPIES.

Writes `{"event": "done", "prefill", "decode"}`, in tokens per second, or an "error". Each of COPIES has
memory of its own and they take turns, so that decoding finds no weights in the processor's caches, as
with a model of a useful size.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.helpers.child import say
from edgeinfer.runtime.libllama import L
from edgeinfer.system.process import die_with_parent

_PROMPT_TOKENS = 256
#: Rounds of either, the best of which counts: something else may use the machine.
_ROUNDS = 3
_DECODE_S = 0.15


def main(argv: list[str]) -> int:
    """Measure `argv[0]`; 0 when figures were written."""
    die_with_parent()
    libllama.lib()
    contexts = []
    for _ in range(int(argv[1])):
        context = _context(argv[0])
        if context is None:
            return say(1, event="error", message="; ".join(libllama.recent_log(3)) or "it did not load")
        contexts.append(context)
    batch = Batch(capacity=_PROMPT_TOKENS, max_outputs=1, n_vocab=64, n_seq_max=1, n_cells=512)
    prefill = max(_prefill(contexts[0], batch) for _ in range(1 + _ROUNDS))
    decode = max(_decode(contexts, batch) for _ in range(_ROUNDS))
    return say(0, event="done", prefill=prefill, decode=decode)


def _context(path: str) -> ActiveContext | None:
    params = L.llama_model_default_params()
    params.load_mode = L.LLAMA_LOAD_MODE_NONE  # memory of its own, also where nothing is repacked
    model = L.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return None
    wanted = L.llama_context_default_params()
    wanted.n_ctx = 512
    wanted.n_batch = wanted.n_ubatch = _PROMPT_TOKENS
    wanted.n_threads = wanted.n_threads_batch = len(os.sched_getaffinity(0))
    context = L.llama_init_from_model(model, wanted)
    return ActiveContext(context) if context else None


def _read(context: ActiveContext, batch: Batch, n_tokens: int) -> None:
    """Compute tokens from an empty cache, and wait until they are."""
    L.llama_memory_clear(L.llama_get_memory(context.context), False)
    batch.clear()
    batch.add([7] * n_tokens, 0, 0, outputs=1)
    batch.decode(context)
    L.llama_synchronize(context.context)


def _prefill(context: ActiveContext, batch: Batch) -> float:
    began = time.perf_counter()
    _read(context, batch, _PROMPT_TOKENS)
    return _PROMPT_TOKENS / (time.perf_counter() - began)


def _decode(contexts: list[Any], batch: Batch) -> float:
    done = 0
    began = time.perf_counter()
    while time.perf_counter() - began < _DECODE_S or done < len(contexts):
        _read(contexts[done % len(contexts)], batch, 1)
        done += 1
    return done / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
