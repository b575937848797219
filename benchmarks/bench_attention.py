"""`make bench-attention`: whole steps of a model after a long context, with our own kernels and
llama.cpp's.

Each side is a process with the model and the same prefilled context; steps of each length alternate
between them. Figures are medians of `--runs` with minimum and maximum, and their ratio. `--variant
haswell` measures that CPU variant of ggml, instead of the best one for this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import (
    LineProcess,
    load_only,
    make_parser,
    model_of,
    model_path,
    numbers,
    spread,
    write_figure,
)

from edgeinfer.bench import markdown
from edgeinfer.runtime.llama import libedgeinfer, libllama

SIDES = ("llama.cpp", "ours")
_BATCH = 512


class Steps:
    """One side, in this process: a context of `depth` tokens, and steps after it."""

    def __init__(self, model: str, depth: int, cache: str, variant: str) -> None:
        if variant:
            load_only(variant)
        self._lib = lib = libllama.lib()
        loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = depth + _BATCH
        params.n_batch = params.n_ubatch = _BATCH
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache.upper()}")
        params.flash_attn_type = 1
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = lib.llama_init_from_model(loaded, params)
        self._depth = depth
        for first in range(0, depth, _BATCH):
            self._decode(first, min(_BATCH, depth - first))

    def step(self, rows: int) -> float:
        """Compute `rows` tokens after the context, and remove them; return the seconds."""
        took_s = self._decode(self._depth, rows)
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, 0, self._depth, -1)
        return took_s

    def _decode(self, first: int, n: int) -> float:
        tokens = (self._lib.llama_token * n)(*(100 + (first + i) * 7919 % 1000 for i in range(n)))
        batch = self._lib.llama_batch_get_one(tokens, n)
        began = time.perf_counter()
        code = self._lib.llama_decode(self._context, batch)
        self._lib.llama_synchronize(self._context)
        took_s = time.perf_counter() - began
        if code:
            raise SystemExit(f"error: llama_decode: {code}")
        return took_s


def serve_steps(side: str, model: str, depth: str, cache: str, variant: str) -> None:
    """Run one side, which computes steps for requests on its standard input."""
    if side != "ours":
        libedgeinfer.use_kernels = lambda ggml, base, binding_version: libedgeinfer.Kernels()
    steps = Steps(model, int(depth), cache, variant)
    print(libllama.build_info().kernels or "-", flush=True)
    for line in sys.stdin:
        print(steps.step(int(line)), flush=True)


def measure(model: Path, cache: str, options: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each step, by number of rows and by side."""
    arguments = [str(model), str(options.depth), cache, options.variant]
    sides = {side: LineProcess(__file__, "--side", side, *arguments) for side in SIDES}
    for side, process in sides.items():
        print(f"{model.name}, {cache}, {side}: kernels {process.read()}")
    times_by_rows: dict[int, dict[str, list[float]]] = {
        rows: {side: [] for side in SIDES} for rows in options.rows
    }
    for _ in range(options.runs):
        for rows, times in times_by_rows.items():
            for side, process in sides.items():
                times[side].append(float(process.ask(str(rows))))
    for process in sides.values():
        process.close()
    return times_by_rows


def table(figures: dict[tuple[str, str], dict[int, dict[str, list[float]]]]) -> str:
    """Return the figure as a Markdown table."""
    lines = []
    for (model, cache), by_rows in figures.items():
        for rows, times in by_rows.items():
            llama_cpp, edgeinfer = (times[side] for side in SIDES)
            share = statistics.median(edgeinfer) / statistics.median(llama_cpp)
            told = (spread([s * 1000 for s in side], "ms") for side in (llama_cpp, edgeinfer))
            lines.append([model, cache, str(rows), *told, f"{share:.2f}"])
    return markdown(["model", "cache", "rows", "llama.cpp's kernels", "ours", "of llama.cpp's"], lines)


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        serve_steps(*sys.argv[2:])
        return
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="small,4b", help="small: SmolLM2; 4b: random weights")
    parser.add_argument("--caches", default="f16,q8_0")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 19, 32, 64, 512])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--variant", default="", help="one of ggml's CPU variants")
    parser.add_argument("--work", type=Path, help="folder in which the generated model is kept")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        for shape in options.shapes.split(","):
            model = model_of(shape, model_path("smollm2"), options.work or Path(temporary))
            for cache in options.caches.split(","):
                figures[shape, cache] = measure(model, cache, options)
    name = "-".join(["attention", *filter(None, [options.variant]), *options.caches.split(",")])
    print(write_figure(options.out, name, table(figures)))


if __name__ == "__main__":
    main()
