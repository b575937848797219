"""`python benchmarks/bench_kv_types.py`: what a KV cache of fewer bits loses, and what a step over it takes.

One text, two windows of `--window` tokens, is scored over caches of each type; the f16 cache is what the others
are compared with. Beside them stands f16 without flash attention: the same cache, summed in another order, so its
row says how far the logits move by rounding alone. "plain" rows have llama.cpp's rotation off
(LLAMA_ATTN_ROT_DISABLE). The times are of one token behind a whole window, the types in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from common import ROOT, add_out, model_path, write_figure

from edgeinfer.bench import markdown
from edgeinfer.runtime.llama.context import ActiveContext, Batch
from edgeinfer.runtime.llama.model import LlamaModel, load_model, open_context
from edgeinfer.runtime.options import LoadOptions, ModelFiles

#: Label, type, flash attention, and LLAMA_ATTN_ROT_DISABLE: llama.cpp rotates quantized types unless it is 1.
KINDS = (
    ("f16", "f16", "on", "0"),
    ("f16, no flash attention", "f16", "off", "0"),
    ("q8_0, rotated", "q8_0", "on", "0"),
    ("q8_0, plain", "q8_0", "on", "1"),
    ("q4_0, rotated", "q4_0", "on", "0"),
    ("q4_0, plain", "q4_0", "on", "1"),
)
_CHUNK = 64
_SKIPPED = 32


def open_contexts(loaded: LlamaModel, n_cells: int) -> list[ActiveContext]:
    """A context for each of KINDS."""
    found = []
    for _, kv_type, flash, is_plain in KINDS:
        os.environ["LLAMA_ATTN_ROT_DISABLE"] = is_plain
        found.append(
            open_context(
                loaded.model,
                LoadOptions(kv_type=kv_type, flash_attention=flash),
                n_cells=n_cells,
                n_batch=_CHUNK,
                n_seq_max=1,
                n_threads=loaded.n_threads,
                n_outputs=_CHUNK,
            )
        )
    return found


def log_softmax(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows = rows - rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def score(
    contexts: Sequence[ActiveContext], loaded: LlamaModel, windows: Sequence[list[int]]
) -> list[tuple[list[float], list[float], list[bool]]]:
    """For each context: negative log-likelihoods, divergences from the first, equal first choices."""
    found: list[tuple[list[float], list[float], list[bool]]] = [([], [], []) for _ in contexts]
    n_vocab = loaded.vocab.n_vocab
    size = len(windows[0])
    batch = Batch(capacity=_CHUNK, max_outputs=_CHUNK, n_vocab=n_vocab, n_seq_max=1, n_cells=size)
    for tokens in windows:
        for active in contexts:
            active.clear()
        for start in range(0, size - 1, _CHUNK):
            piece = tokens[start : min(start + _CHUNK, size - 1)]
            skip = max(0, _SKIPPED - start)
            wanted = np.array(tokens[start + 1 : start + 1 + len(piece)])
            base = None
            for active, (losses, divergences, tops) in zip(contexts, found, strict=True):
                batch.clear()
                batch.add(piece, start, 0, outputs=len(piece))
                assert not batch.decode(active)
                own = log_softmax(active.rows(len(piece), n_vocab).copy())[skip:]
                base = own if base is None else base
                losses += (-own[np.arange(len(own)), wanted[skip:]]).tolist()
                divergences += (np.exp(base) * (base - own)).sum(axis=1).tolist()
                tops += (base.argmax(axis=1) == own.argmax(axis=1)).tolist()
    return found


def step_times(
    contexts: Sequence[ActiveContext], loaded: LlamaModel, n_past: int, rounds: int
) -> list[float]:
    """Median milliseconds of one token behind `n_past`, the contexts in turn."""
    n_vocab = loaded.vocab.n_vocab
    batch = Batch(capacity=1, max_outputs=1, n_vocab=n_vocab, n_seq_max=1, n_cells=n_past + 1)
    took: list[list[float]] = [[] for _ in contexts]
    for _ in range(rounds):
        for active, times in zip(contexts, took, strict=True):
            active.remove(0, n_past)
            batch.clear()
            batch.add([loaded.vocab.eos], n_past, 0, outputs=1)
            began = time.perf_counter()
            assert not batch.decode(active)
            times.append((time.perf_counter() - began) * 1000)
    return [statistics.median(times) for times in took]


def measure(name: str, model: str, size: int, rounds: int, n_windows: int) -> list[list[str]]:
    """A row for each of KINDS."""
    files = ModelFiles(name=name, paths=(str(model_path(model)),))
    loaded = load_model(files, LoadOptions(n_ctx=256, n_parallel=1), None)
    pages = sorted([*ROOT.glob("docs/concepts/*.md"), *ROOT.glob("docs/guides/*.md")])
    text = "\n\n".join(page.read_text() for page in pages)
    tokens = loaded.vocab.tokenize(text, add_special=True)
    windows = [tokens[i * size : (i + 1) * size] for i in range(n_windows)]
    assert len(windows[-1]) == size
    contexts = open_contexts(loaded, size + 1)
    scores = score(contexts, loaded, windows)
    times = step_times(contexts, loaded, size - 1, rounds) if rounds else [0.0] * len(KINDS)
    base = float(np.mean(scores[0][0]))
    rows = []
    for (label, *_), (losses, divergences, tops), took in zip(KINDS, scores, times, strict=True):
        change = np.array(losses) - np.array(scores[0][0])
        margin = 2 * float(change.std()) / len(change) ** 0.5
        rows.append(
            [
                name,
                label,
                f"{np.exp(np.mean(losses)):.3f}",
                f"{np.expm1(np.mean(losses) - base):+.2%} ± {margin:.2%}",
                f"{np.mean(divergences):.5f}",
                f"{np.percentile(divergences, 99):.4f}",
                f"{np.mean(tops):.2%}",
                f"{took:.2f}" if took else "–",
            ]
        )
    for active in contexts:
        active.free()
    loaded.free()
    return rows


def main() -> None:
    """Write OUT/kv-types.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60, help="timed steps; 0: none")
    add_out(parser)
    options = parser.parse_args()
    rows = []
    for name, model in (("SmolLM2 135M Q4_1", "smollm2"), ("Gemma 3 270M Q4_K_M", "gemma3")):
        rows += measure(name, model, options.window, options.rounds, options.windows)
    head = (
        "model",
        "KV cache",
        "perplexity",
        "change",
        "divergence (nats)",
        "p99",
        "same first choice",
        f"ms a token behind {options.window}",
    )
    print(write_figure(options.out, "kv-types", markdown(head, rows)))


if __name__ == "__main__":
    main()
