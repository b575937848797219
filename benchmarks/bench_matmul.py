"""`make bench-matmul`: rows of a batch a second, by type of weights: kernels of our own beside llama.cpp's.

A row is 0.807 G weights, a qwen3 of eight layers and width 2,560; what is multiplied is a part of it that no
cache holds. The sides are processes that take turns: ours and llama.cpp's ("plain") on the same weights, and
llama.cpp's on repacked ones where it repacks the type. Shares are of the CPU's integer peak
(`vpdpbusd`, measured before and after). `--variant haswell` measures another of ggml's CPU variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
from common import add_out, load_only, write_figure
from matmul_ops import TYPES, Products, random_weights

from edgeinfer.runtime.llama import libedgeinfer, libllama

_ROWS, _WIDTH = 4864, 2560
_MATRICES = 12
#: Many rows read the weights once for all: fewer matrices say the same.
_MATRICES_OF_MANY = 3
_ROW_WEIGHTS = 0.807e9
#: What llama.cpp repacks for AVX2 and AVX-512.
_REPACKED = ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL")
SIDES = ("ours", "plain", "repacked")
_PEAK = Path(__file__).with_name("cpu_peak.c")


def serve_side(side: str, variant: str) -> None:
    """Time the products of all matrices (s) for each line `TYPE ROWS` of standard input."""
    if side != "ours":
        libedgeinfer.use_kernels = lambda ggml, base, version: libedgeinfer.Kernels()
    if variant:
        load_only(variant)
    libllama.lib()
    weights, kind = [], ""
    for line in sys.stdin:
        wanted, rows = line.split()
        if wanted != kind:
            kind = wanted
            weights = [random_weights(kind, _ROWS, _WIDTH, seed) for seed in range(_MATRICES)]
        used = weights if int(rows) < 64 else weights[:_MATRICES_OF_MANY]
        products = Products(kind, used, int(rows), is_repacked=side == "repacked")
        products.compute(np.random.default_rng(0).normal(size=(int(rows), _WIDTH)))
        times = []
        for _ in range(7 if int(rows) < 64 else 2):
            began = time.perf_counter()
            products.compute()
            times.append(time.perf_counter() - began)
        products.close()
        print(json.dumps(times), flush=True)


def peak() -> float:
    """Return what two threads multiply and accumulate at most, in G a second; 0 without VNNI."""
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "peak"
        subprocess.run(["gcc", "-O3", "-march=native", "-pthread", _PEAK, "-o", program], check=True)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else 0.0


def measure(
    kinds: list[str], rows: list[int], rounds: int, variant: str
) -> Iterator[tuple[str, dict[str, dict[int, float]]]]:
    """Yield each type with the medians of rows a second, by side and rows."""
    command = [sys.executable, __file__, "--variant", variant, "--side"]
    sides = {
        side: subprocess.Popen(
            [*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for side in SIDES
    }
    for kind in kinds:
        found: dict[str, dict[int, float]] = {side: {} for side in SIDES}
        for n in rows:
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(rounds):
                for side, process in sides.items():
                    if side == "repacked" and kind not in _REPACKED:
                        continue
                    process.stdin.write(f"{kind} {n}\n")
                    times[side] += json.loads(process.stdout.readline())
            for side, seconds in times.items():
                if seconds:
                    matrices = _MATRICES if n < 64 else _MATRICES_OF_MANY
                    weights = n * _ROWS * _WIDTH * matrices
                    found[side][n] = weights / _ROW_WEIGHTS / statistics.median(seconds)
        yield kind, found
    for process in sides.values():
        process.stdin.close()
        process.wait()


def table(found: dict[str, dict[str, dict[int, float]]], rows: list[int], peak_g: float) -> str:
    """Return the figure's rows: ours, and in brackets the better one of llama.cpp's."""
    lines = [f"Integer peak: {peak_g:.0f} G multiply-accumulates a second.\n"] if peak_g else []
    lines += [
        f"| type | {' | '.join('1 row' if n == 1 else f'{n} rows' for n in rows)} | of the peak at {rows[-1]} |",
        "| --- |" + " --- |" * (len(rows) + 1),
    ]
    for kind, sides in found.items():
        cells = []
        for n in rows:
            best = max(sides["plain"][n], sides["repacked"].get(n, 0))
            cells.append(f"{sides['ours'][n]:.0f} ({best:.0f}, {sides['ours'][n] / best:.2f} x)")
        share = sides["ours"][rows[-1]] * _ROW_WEIGHTS / 1e9 / peak_g if peak_g else 0
        lines.append(f"| {kind} | {' | '.join(cells)} | {f'{share:.0%}' if share else '–'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(TYPES))
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", default="", help="one of ggml's CPU variants")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    add_out(parser)
    parser.set_defaults(rows=[1, 2, 4, 8, 16, 32, 64, 512])
    options = parser.parse_args()
    if options.side:
        serve_side(options.side, options.variant)
        return
    before = peak()
    found = {}
    for kind, sides in measure(options.types, options.rows, options.rounds, options.variant):
        found[kind] = sides
        print(
            kind,
            {side: {n: round(r) for n, r in by_rows.items()} for side, by_rows in sides.items()},
            flush=True,
        )
    name = "-".join(["matmul", *filter(None, [options.variant])])
    print(write_figure(options.out, name, table(found, options.rows, max(before, peak()))))


if __name__ == "__main__":
    main()
