"""`make bench-matmul`: rows/s of a batch, by type of weights: our own kernels compared with
llama.cpp's.

Rows/s are those of a qwen3 of eight layers and width 2,560: a row is multiplied with its 0.807 G
weights. The measured matrices are a part of them, which exceeds every cache. The sides are processes
that take turns: ours and llama.cpp's ("plain") on the same weights, and llama.cpp's on repacked weights
if it repacks the type; with `--ik`, also ik_llama.cpp's on plain and on repacked ones. Shares are of
the CPU's integer peak with the instructions of that level (cpu_peak.c, measured before and after).
Types of few bits may exceed AVX2's peak, because their sums need only 16 bits for some steps. The rate
of one row is also given in GB of weights per second, for comparison with a plain loop that reads
memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
from common import LineProcess, load_only, make_parser, numbers, write_figure
from matmul_ops import TYPES, Bytes, Products, declare, random_weights

from edgeinfer.bench import markdown
from edgeinfer.runtime.llama import libedgeinfer, libllama

_ROWS, _WIDTH = 4864, 2560
#: 280 MB at four bits: with 84 MB, an L3 cache of 32 MB served a part, which favoured the fastest side.
_MATRICES = 40
#: Many rows read the weights only once, so fewer matrices suffice.
_MANY, _MATRICES_OF_MANY = 64, 3
_ROW_WEIGHTS = 0.807e9
#: Types that llama.cpp repacks for AVX2 and AVX-512; Q2_K only for AVX-512.
_REPACKED = ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL")
#: Level of our kernels → the variant of ggml's CPU backend for it, and compiler flags of _PEAK.
_LEVELS = {
    "v3": ("haswell", "-march=x86-64-v3"),
    "v3-vnni": ("alderlake", "-march=x86-64-v3 -mavxvnni"),
    "v4": ("zen4", "-march=x86-64-v4 -mavx512vnni"),
}
_PEAK = Path(__file__).with_name("cpu_peak.c")


class _IkPlan(ctypes.Structure):
    """ggml_cplan of ik_llama.cpp."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("moe_expert_prefetch", ctypes.c_bool),
    )


class _IkProducts(Products):
    """The same graph in ik_llama.cpp's ggml, which is one library."""

    library: ctypes.CDLL

    @classmethod
    def libraries(cls) -> tuple[ctypes.CDLL, ctypes.CDLL]:
        return declare(cls.library, cls.library)

    def _place_tensors(
        self, weights: list[Bytes], kind: int, shape: tuple[int, ...], is_repacked: bool
    ) -> list[int]:
        tensors = super()._place_tensors(weights, kind, shape, is_repacked=False)
        for tensor in tensors if is_repacked else []:
            self.library.iqk_repack_tensor(ctypes.c_void_p(tensor))
        return tensors

    def plan(self, n_threads: int) -> ctypes.Structure:
        graph_plan = self.library.ggml_graph_plan
        graph_plan.restype, graph_plan.argtypes = _IkPlan, [ctypes.c_void_p, ctypes.c_int]
        planned: ctypes.Structure = graph_plan(self._graph, n_threads)
        return planned


def serve_side(side: str, level: str, ik: str) -> None:
    """Time the products of all matrices (s) for each line `TYPE ROWS` of standard input."""
    products_of = Products
    if side.startswith("ik"):
        products_of = _IkProducts
        _IkProducts.library = ctypes.CDLL(str(next(Path(ik).rglob("libggml.so"))))
    else:
        if side != "ours":
            libedgeinfer.use_kernels = lambda ggml, base, binding_version: libedgeinfer.Kernels()
        if level:
            load_only(_LEVELS[level][0])
        libllama.lib()
    weights, kind = [], ""
    for line in sys.stdin:
        next_kind, rows = line.split()
        if next_kind != kind:
            kind = next_kind  # the list repeats one matrix, but each is copied to a separate address
            weights = [random_weights(kind, _ROWS, _WIDTH)] * _MATRICES
        used = weights if int(rows) < _MANY else weights[:_MATRICES_OF_MANY]
        products = products_of(kind, used, int(rows), is_repacked=side.endswith("repacked"))
        products.compute(np.random.default_rng(0).normal(size=(int(rows), _WIDTH)))
        times = []
        for _ in range(5 if int(rows) < 16 else 2):
            began = time.perf_counter()
            products.compute()
            times.append(time.perf_counter() - began)
        products.close()
        print(json.dumps(times), flush=True)


def peak(level: str, file: Path | None = None) -> list[float]:
    """Return four limits of the machine at a level of x86-64; zeros at other levels.

    The first is that of G multiply-accumulates per second with two threads. The others are GB/s that a
    plain loop reads: the maximum with one thread, and the maximum and the median with two. The loop
    reads memory, or all of the mapped `file`, which is in the page cache.
    """
    if level not in _LEVELS:
        return [0.0, 0.0, 0.0, 0.0]
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "peak"
        options = ["-O3", *_LEVELS[level][1].split(), "-pthread"]
        subprocess.run(["gcc", *options, _PEAK, "-o", program], check=True)
        done = subprocess.run(
            [program, *([file] if file else [])], capture_output=True, text=True, check=True
        )
    return [float(rate) for rate in done.stdout.split()]


def measure(
    kinds: list[str], rows: list[int], rounds: int, level: str, ik: str
) -> Iterator[tuple[str, dict[str, dict[int, float]]]]:
    """Yield each type with the medians of rows/s, by side and rows."""
    names = ["ours", "plain", "repacked", *(["ik", "ik-repacked"] if ik else [])]
    arguments = [__file__, "--level", level, "--ik", ik, "--side"]
    sides = {side: LineProcess(*arguments, side) for side in names}
    repacked = [k for k in _REPACKED if k != "Q2_K" or libllama.build_info().kernels == "v4"]
    for kind in kinds:
        rates: dict[str, dict[int, float]] = {side: {} for side in sides}
        for n in rows:
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, process in sides.items():
                    if side == "repacked" and kind not in repacked:
                        continue
                    times[side] += json.loads(process.ask(f"{kind} {n}"))
            for side, seconds in times.items():
                if seconds:
                    matrices = _MATRICES if n < _MANY else _MATRICES_OF_MANY
                    weights = n * _ROWS * _WIDTH * matrices
                    rates[side][n] = weights / _ROW_WEIGHTS / statistics.median(seconds)
        yield kind, rates
    for process in sides.values():
        process.close()


def table(
    rates_by_kind: dict[str, dict[str, dict[int, float]]], rows: list[int], peaks: tuple[float, ...]
) -> str:
    """Return the figure: ours, and in brackets the best of each peer."""
    peak_g, *reads = peaks
    limits = (
        f"Integer peak: {peak_g:.0f} G multiply-accumulates a second. A plain loop reads "
        f"{reads[0]:.0f} GB a second with one thread, {reads[1]:.0f} with two.\n\n"
    )
    heads = ["1 row" if n == 1 else f"{n} rows" for n in rows]
    peers = (("plain", "repacked"), ("ik", "ik-repacked"))
    lines = []
    for kind, sides in rates_by_kind.items():
        own_rates, cells = sides["ours"], []
        for n in rows:
            bests = [
                max(sides[s][n] for s in peer if n in sides.get(s, {}))
                for peer in peers
                if peer[0] in sides
            ]
            beside = [*(f"{best:.0f}" for best in bests), f"{own_rates[n] / max(bests):.2f} x"]
            cells.append(f"{own_rates[n]:.0f} ({', '.join(beside)})")
        share = f"{own_rates[rows[-1]] * _ROW_WEIGHTS / 1e9 / peak_g:.0%}" if peak_g else "–"
        block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        read = own_rates[rows[0]] / rows[0] * _ROW_WEIGHTS / block * n_bytes / 1e9
        lines.append([kind, *cells, f"{read:.1f}", share])
    head = ["type", *heads, f"GB/s at {heads[0]}", f"of the peak at {rows[-1]}"]
    return limits * bool(peak_g) + markdown(head, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(TYPES))
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    level_help = "level of our kernels; by default the best"
    parser.add_argument("--level", default="", choices=["", *_LEVELS], help=level_help)
    ik = "folder of a built ik_llama.cpp with libggml.so"
    parser.add_argument("--ik", default="", metavar="FOLDER", help=ik)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve_side(options.side, options.level, options.ik)
        return
    if options.level:
        load_only(_LEVELS[options.level][0])  # the figure's head names it
    level = libllama.build_info().kernels
    before = peak(level)
    rates_by_kind = {}
    for kind, sides in measure(options.types, options.rows, options.rounds, options.level, options.ik):
        rates_by_kind[kind] = sides
        rounded = {side: {n: round(r) for n, r in rates.items()} for side, rates in sides.items()}
        print(kind, rounded, flush=True)
    first = "" if options.types == list(TYPES) else options.types[0]
    name = "-".join(filter(None, ["matmul", options.level, first]))
    peaks = tuple(max(pair) for pair in zip(before, peak(level), strict=True))
    print(write_figure(options.out, name, table(rates_by_kind, options.rows, peaks)))


if __name__ == "__main__":
    main()
