"""Two builds of llama.cpp side by side: prefill and decode rates of the same model under two
interpreters, alternated.

    python benchmarks/bench_build.py MODEL.gguf NAME=PYTHON NAME=PYTHON [ROUNDS]

Each round starts each interpreter anew in turn, so a drift of the machine's speed falls on both.
"""

import json
import statistics
import subprocess
import sys

from common import head

PROBE = r"""
import ctypes, json, os, sys, time
import llama_cpp, llama_cpp.llama_cpp as L
quiet = L.llama_log_callback(lambda *_: None); L.llama_log_set(quiet, ctypes.c_void_p(0))
package = os.path.dirname(llama_cpp.__file__)
variants = os.path.join(os.path.dirname(package), "bin")
if os.path.isdir(variants):
    ctypes.CDLL(os.path.join(package, "lib", "libggml.so.0")).ggml_backend_load_all_from_path(variants.encode())
L.llama_backend_init()
m = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
p = L.llama_context_default_params(); p.n_ctx, p.n_batch, p.n_ubatch, p.n_threads, p.n_threads_batch = 1024, 512, 512, 2, 2
c = L.llama_init_from_model(m, p)
def decode(tokens):
    held = (L.llama_token * len(tokens))(*tokens)
    assert L.llama_decode(c, L.llama_batch_get_one(held, len(tokens))) == 0
    L.llama_synchronize(c)
decode(range(100, 164)); start = time.perf_counter(); decode(range(100, 356)); prefill = 256 / (time.perf_counter() - start)
start = time.perf_counter()
for i in range(96): decode([200 + i])
print(json.dumps({"prefill": prefill, "decode": 96 / (time.perf_counter() - start)}))
"""


def measure(python: str, model: str) -> dict[str, float]:
    out = subprocess.run(
        [python, "-c", PROBE, model], capture_output=True, text=True, check=True
    ).stdout
    return json.loads(out)


def main() -> None:
    model, sides = sys.argv[1], dict(arg.split("=", 1) for arg in sys.argv[2:4])
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 9
    runs = {name: [] for name in sides}
    for _ in range(rounds):
        for name, python in sides.items():
            runs[name].append(measure(python, model))
    print(head() + "\n")
    print(
        "| build | prefill tokens/s (min to max) | decode tokens/s (min to max) |\n| --- | --- | --- |"
    )
    for name, values in runs.items():
        cells = [[v[k] for v in values] for k in ("prefill", "decode")]
        print(
            f"| {name} | "
            + " | ".join(f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in cells)
            + " |"
        )
    first, second = runs.values()
    for what in ("prefill", "decode"):
        ratios = [a[what] / b[what] for a, b in zip(first, second, strict=True)]
        print(
            f"\n{what} {' / '.join(sides)}, pair by pair: median {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
