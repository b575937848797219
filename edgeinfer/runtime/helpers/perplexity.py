"""How well a model predicts a text: `python -m edgeinfer.runtime.helpers.perplexity MODEL TEXT
[TOKENS]`.

Writes `{"event": "progress", "done", "total"}` lines and then `{"event": "done", "perplexity",
"n_tokens"}`. The text is read once from its beginning, in one window; every token after the first 32 is
scored. Two files of one model can be compared with it, models with different vocabularies cannot.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import DecodeError
from edgeinfer.runtime import libllama
from edgeinfer.runtime.helpers.child import die_with_parent, say

SKIPPED_TOKENS = 32
_WINDOW_TOKENS = 1024
#: Positions decoded at once; bounds the logits kept (64 rows of 262,144 floats are 67 MB).
_BATCH_TOKENS = 64


def main(argv: list[str]) -> int:
    """Score the text; 0 when a figure was written."""
    die_with_parent()
    llama = libllama.lib()
    limit = int(argv[2]) if len(argv) > 2 else _WINDOW_TOKENS
    model = llama.llama_model_load_from_file(argv[0].encode(), llama.llama_model_default_params())
    if not model:
        return say(
            1,
            event="error",
            message="; ".join(libllama.recent_log(3)) or "llama.cpp could not load the model",
        )
    tokens = _tokenize(llama, model, Path(argv[1]).read_bytes())[:limit]
    context = _context(llama, model, len(tokens))
    if not context:
        return say(
            1,
            event="error",
            message="; ".join(libllama.recent_log(3)) or "llama.cpp could not make a context",
        )
    scored = len(tokens) - 1 - SKIPPED_TOKENS
    if scored < 1:
        return say(1, event="error", message=f"the text has {len(tokens)} tokens, too few to score")
    try:
        nll = _negative_log_likelihood(
            llama, context, tokens, llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        )
    except DecodeError as error:
        return say(1, event="error", message=error.message)
    return say(0, event="done", perplexity=math.exp(min(700.0, nll / scored)), n_tokens=scored)


def _tokenize(llama: Any, model: Any, text: bytes) -> list[int]:
    room = (ctypes.c_int32 * (len(text) + 8))()
    vocab = llama.llama_model_get_vocab(model)
    n = llama.llama_tokenize(vocab, text, len(text), room, len(room), True, False)
    return list(room[: max(0, n)])


def _context(llama: Any, model: Any, n_tokens: int) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = n_tokens
    params.n_batch = params.n_ubatch = params.n_outputs_max = _BATCH_TOKENS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return llama.llama_init_from_model(model, params)


def _negative_log_likelihood(llama: Any, context: Any, tokens: list[int], n_vocab: int) -> float:
    """Natural logs, summed over the scored tokens."""
    total = 0.0
    batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)
    for start in range(0, len(tokens) - 1, _BATCH_TOKENS):
        piece = tokens[start : min(start + _BATCH_TOKENS, len(tokens) - 1)]
        _fill(batch, piece, start)
        if llama.llama_decode(context, batch):
            raise DecodeError("llama_decode failed on the text")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), shape=(len(piece), n_vocab))
        total += _scores(
            logits, np.array(tokens[start + 1 : start + 1 + len(piece)]), max(0, SKIPPED_TOKENS - start)
        )
        say(event="progress", done=start + len(piece), total=len(tokens) - 1)
    llama.llama_batch_free(batch)
    return total


def _fill(batch: Any, piece: list[int], start: int) -> None:
    batch.n_tokens = len(piece)
    for i, token in enumerate(piece):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, 1
        batch.seq_id[i][0] = 0


def _scores(logits: Any, following: Any, skip: int) -> float:
    rows = logits[skip:].astype(np.float64)
    if not len(rows):
        return 0.0
    top = rows.max(axis=1)
    log_sum = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    return float((log_sum - rows[np.arange(len(rows)), following[skip:]]).sum())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
