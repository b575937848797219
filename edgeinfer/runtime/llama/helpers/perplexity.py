"""Measure how well a model predicts a text: `python -m` this, MODEL TEXT [TOKENS [COMPARED]].

Writes `{"event": "progress", "done", "total"}` lines and then `{"event": "done", "perplexity",
"n_tokens"}`. COMPARED is another file of the same model: then the line has "compared_perplexity" too,
the mean Kullback-Leibler "divergence" of the model from it in nats a token, and "same_top", the share
of tokens of which both think the same is likeliest. The text is read once from its beginning, in one
window; every token after the first 32 is scored. Two files of one model can be compared with it, models
with different vocabularies cannot.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import DecodeError
from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.helpers import fail, say, scoring_params
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.vocab import Vocab

SKIPPED_TOKENS = 32
_WINDOW_TOKENS = 1024
#: Positions decoded at once; bounds the logits kept (64 rows of 262,144 floats are 67 MB).
_BATCH_TOKENS = 64


def main(argv: list[str]) -> int:
    """Score the text; 0 if a figure was written."""
    die_with_parent()
    libllama.lib()
    limit = (int(argv[2]) if len(argv) > 2 else 0) or _WINDOW_TOKENS
    names = [argv[0], *argv[3:4]] if argv[3:4] != [""] else [argv[0]]
    models = [
        L.llama_model_load_from_file(os.fsencode(name), L.llama_model_default_params())
        for name in names
    ]
    if not all(models):
        return fail("llama.cpp could not load the model")
    vocab = Vocab(models[0])
    text = Path(argv[1]).read_text("utf-8", "replace")
    tokens = vocab.tokenize(text, add_special=True)[:limit]
    scored = len(tokens) - 1 - SKIPPED_TOKENS
    if scored < 1:
        return say(1, event="error", message=f"the text has {len(tokens)} tokens, too few to score")
    if any(Vocab(model).n_vocab != vocab.n_vocab for model in models):
        return say(1, event="error", message="the two files have different vocabularies")
    params = scoring_params(len(tokens), _BATCH_TOKENS)
    contexts = [L.llama_init_from_model(model, params) for model in models]
    if not all(contexts):
        return fail("llama.cpp could not make a context")
    try:
        sums = _sums([ActiveContext(context) for context in contexts], tokens, vocab.n_vocab)
    except DecodeError as error:
        return say(1, event="error", message=error.message)
    figures = {"perplexity": math.exp(min(700.0, sums[0] / scored)), "n_tokens": scored}
    if len(models) > 1:
        figures["compared_perplexity"] = math.exp(min(700.0, sums[1] / scored))
        figures["divergence"] = max(0.0, sums[2] / scored)
        figures["same_top"] = sums[3] / scored
    return say(0, event="done", **figures)


def _sums(contexts: list[ActiveContext], tokens: list[int], n_vocab: int) -> list[float]:
    """Negative log-likelihoods in nats; of two contexts also their divergence and agreement."""
    sums = [0.0, 0.0, 0.0, 0.0]
    batch = Batch(
        capacity=_BATCH_TOKENS,
        max_outputs=_BATCH_TOKENS,
        n_vocab=n_vocab,
        n_seq_max=1,
        n_cells=len(tokens),
    )
    for start in range(0, len(tokens) - 1, _BATCH_TOKENS):
        piece = tokens[start : min(start + _BATCH_TOKENS, len(tokens) - 1)]
        following = np.array(tokens[start + 1 : start + 1 + len(piece)])
        skip = max(0, SKIPPED_TOKENS - start)
        found = []
        for number, active in enumerate(contexts):
            batch.clear()
            batch.add(piece, start, 0, outputs=len(piece))
            if batch.decode(active):
                raise DecodeError("llama_decode failed on the text")
            logits = np.ctypeslib.as_array(
                L.llama_get_logits(active.context), shape=(len(piece), n_vocab)
            )
            found.append(_log_probabilities(logits[skip:]))
            rows = np.arange(len(found[-1]))
            sums[number] -= float(found[-1][rows, following[skip:]].sum())
        if len(found) > 1:
            own, other = found
            sums[2] += float((np.exp(other) * (other - own)).sum())
            sums[3] += float((own.argmax(axis=1) == other.argmax(axis=1)).sum())
        say(event="progress", done=start + len(piece), total=len(tokens) - 1)
    return sums


def _log_probabilities(logits: Any) -> Any:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
