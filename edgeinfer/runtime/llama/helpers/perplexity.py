"""Measure how well a model predicts a text. Arguments: MODEL TEXT [TOKENS [COMPARED]].

Writes `{"event": "progress", "done", "total"}` lines and then `{"event": "done", "perplexity",
"n_tokens"}`. COMPARED is another file of the same model (usually less quantized) with the same
vocabulary. With COMPARED, the last line also has that file's "compared_perplexity", the mean
Kullback-Leibler "divergence" of MODEL from COMPARED (nats per token), and "same_top", the share of
tokens for which both have the same most likely token. The first TOKENS tokens of the text are
computed in one context, and all but the first 32 are scored.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.helpers import report
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.model import make_context
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import open_model

SKIPPED_TOKENS = 32
_WINDOW_TOKENS = 1024
#: Tokens per llama_decode. Their logits take 67 MB with a vocabulary of 262,144.
_BATCH_TOKENS = 64


def measure(argv: list[str]) -> dict[str, float]:
    """Measure a model's perplexity; return figures by name, such as "perplexity".

    `argv` is MODEL TEXT [TOKENS [COMPARED]]: the files of a model and of a text, the maximum number of
    tokens, and the file of a second model to compare. Raises ModelLoadError, OutOfMemoryError,
    DecodeError; UsageError if the text is too short or the vocabularies differ.
    """
    limit = (int(argv[2]) if len(argv) > 2 else 0) or _WINDOW_TOKENS
    models = [open_model((name,)) for name in (argv[0], *filter(None, argv[3:4]))]
    vocab = Vocab(models[0])
    text = Path(argv[1]).read_text("utf-8", "replace")
    tokens = vocab.tokenize(text, add_special=True)[:limit]
    scored = len(tokens) - 1 - SKIPPED_TOKENS
    if scored < 1:
        problem = f"{len(tokens)} tokens of text are too few; at least {SKIPPED_TOKENS + 2} are needed"
        raise UsageError(problem, hint="give a longer text or a larger number of tokens")
    if any(Vocab(model).n_vocab != vocab.n_vocab for model in models):
        problem = f"{argv[0]} and {argv[3]} have different vocabularies"
        raise UsageError(problem, hint="compare two quantizations of the same model")
    params = libllama.lib().llama_context_default_params()
    params.n_ctx = len(tokens)
    params.n_batch = params.n_ubatch = params.n_outputs_max = _BATCH_TOKENS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    contexts = [LlamaContext(make_context(model, params)[0]) for model in models]
    sums = _sums(contexts, tokens, vocab.n_vocab)
    figures = {"perplexity": math.exp(min(700.0, sums[0] / scored)), "n_tokens": scored}
    if len(models) > 1:
        figures["compared_perplexity"] = math.exp(min(700.0, sums[1] / scored))
        figures["divergence"] = max(0.0, sums[2] / scored)
        figures["same_top"] = sums[3] / scored
    return figures


def _sums(contexts: list[LlamaContext], tokens: list[int], n_vocab: int) -> list[float]:
    """Return four sums over the scored tokens.

    Negative log-likelihoods (nats) of the first and second model, Kullback-Leibler divergences, and how
    often both models have the same most likely token.
    """
    sums = [0.0, 0.0, 0.0, 0.0]
    batch = Batch.of(contexts[0], max_outputs=_BATCH_TOKENS)
    for start in range(0, len(tokens) - 1, _BATCH_TOKENS):
        piece = tokens[start : min(start + _BATCH_TOKENS, len(tokens) - 1)]
        following = np.array(tokens[start + 1 : start + 1 + len(piece)])
        skip = max(0, SKIPPED_TOKENS - start)
        log_probs = []
        for number, context in enumerate(contexts):
            batch.clear()
            batch.add(piece, start, 0, outputs=len(piece))
            if code := batch.decode(context):
                raise libllama.decode_error(code, f"tokens {start} to {start + len(piece) - 1}")
            logits = np.ctypeslib.as_array(
                L.llama_get_logits(context.pointer), shape=(len(piece), n_vocab)
            )
            log_probs.append(_log_probabilities(logits[skip:]))
            rows = np.arange(len(log_probs[-1]))
            sums[number] -= float(log_probs[-1][rows, following[skip:]].sum())
        if len(log_probs) > 1:
            first, second = log_probs
            sums[2] += float((np.exp(second) * (second - first)).sum())
            sums[3] += float((first.argmax(axis=1) == second.argmax(axis=1)).sum())
        report(event="progress", done=start + len(piece), total=len(tokens) - 1)
    return sums


def _log_probabilities(logits: Any) -> Any:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def main() -> int:
    """Measure a model's perplexity; write figures or an error to stdout; return 0 on success."""
    die_with_parent()
    try:
        return report(event="done", **measure(sys.argv[1:]))
    except EdgeInferError as error:
        return report(1, event="error", message=error.message)


if __name__ == "__main__":
    sys.exit(main())
