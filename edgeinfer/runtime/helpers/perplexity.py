"""Measure how well a model predicts a text: `python -m` this, MODEL TEXT [TOKENS].

Writes `{"event": "progress", "done", "total"}` lines and then `{"event": "done", "perplexity",
"n_tokens"}`. The text is read once from its beginning, in one window; every token after the first 32 is
scored. Two files of one model can be compared with it, models with different vocabularies cannot.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import DecodeError
from edgeinfer.process import die_with_parent
from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.helpers.child import say
from edgeinfer.runtime.libllama import L
from edgeinfer.runtime.vocab import Vocab

SKIPPED_TOKENS = 32
_WINDOW_TOKENS = 1024
#: Positions decoded at once; bounds the logits kept (64 rows of 262,144 floats are 67 MB).
_BATCH_TOKENS = 64


def main(argv: list[str]) -> int:
    """Score the text; 0 when a figure was written."""
    die_with_parent()
    libllama.lib()
    limit = int(argv[2]) if len(argv) > 2 else _WINDOW_TOKENS
    model = L.llama_model_load_from_file(os.fsencode(argv[0]), L.llama_model_default_params())
    if not model:
        return _failed("llama.cpp could not load the model")
    vocab = Vocab(model)
    text = Path(argv[1]).read_text("utf-8", "replace")
    tokens = vocab.tokenize(text, add_special=True)[:limit]
    scored = len(tokens) - 1 - SKIPPED_TOKENS
    if scored < 1:
        return say(1, event="error", message=f"the text has {len(tokens)} tokens, too few to score")
    context = _context(model, len(tokens))
    if not context:
        return _failed("llama.cpp could not make a context")
    try:
        nll = _negative_log_likelihood(context, tokens, vocab.n_vocab)
    except DecodeError as error:
        return say(1, event="error", message=error.message)
    return say(0, event="done", perplexity=math.exp(min(700.0, nll / scored)), n_tokens=scored)


def _failed(what: str) -> int:
    return say(1, event="error", message="; ".join(libllama.recent_log(3)) or what)


def _context(model: Any, n_tokens: int) -> Any:
    params = L.llama_context_default_params()
    params.n_ctx = n_tokens
    params.n_batch = params.n_ubatch = params.n_outputs_max = _BATCH_TOKENS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return L.llama_init_from_model(model, params)


def _negative_log_likelihood(context: Any, tokens: list[int], n_vocab: int) -> float:
    """Natural logs, summed over the scored tokens. Raises DecodeError."""
    total = 0.0
    active = ActiveContext(context)
    batch = Batch(
        capacity=_BATCH_TOKENS,
        max_outputs=_BATCH_TOKENS,
        n_vocab=n_vocab,
        n_seq_max=1,
        n_cells=len(tokens),
    )
    for start in range(0, len(tokens) - 1, _BATCH_TOKENS):
        piece = tokens[start : min(start + _BATCH_TOKENS, len(tokens) - 1)]
        batch.clear()
        batch.add(piece, start, 0, outputs=len(piece))
        if batch.decode(active):
            raise DecodeError("llama_decode failed on the text")
        logits = np.ctypeslib.as_array(L.llama_get_logits(context), shape=(len(piece), n_vocab))
        following = np.array(tokens[start + 1 : start + 1 + len(piece)])
        total += _scores(logits, following, max(0, SKIPPED_TOKENS - start))
        say(event="progress", done=start + len(piece), total=len(tokens) - 1)
    return total


def _scores(logits: Any, following: Any, skip: int) -> float:
    """Sum the negative log-likelihoods of `following` under `logits`, without `skip` rows.

    `following` is int[rows], `logits` float32[rows, n_vocab].
    """
    rows = logits[skip:].astype(np.float64)
    if not len(rows):
        return 0.0
    top = rows.max(axis=1)
    log_sum = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    return float((log_sum - rows[np.arange(len(rows)), following[skip:]]).sum())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
