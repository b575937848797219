"""`make bench-method`: does `edgeinfer bench` measure what llama-bench measures?

llama-bench and llama-server of one build run the same kernels on the same file: what `bench --against` finds of the server is
compared with llama-bench and with what the server says. Beside them our endpoint, measured as a model and as an --against by the same code, and once more
with llama.cpp's kernels instead. Micro-batches have 128 tokens, as our engine gives a lone prompt. llama-bench runs before
and after. Writes OUT/bench-method.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import httpx2
import peer_server
from bench_serve import CLI, process, wait_healthy
from common import add_out, free_port, model_path, peer_program, write_figure

from edgeinfer.bench import markdown

N_CTX, UBATCH = 4096, 128
TESTS = ("pp512", "tg128")
#: The endpoint without the library of kernels.
OFF = (
    "import sys; from edgeinfer.runtime.llama import libedgeinfer as l; l.use_kernels = lambda *_: l.Kernels();"
    " from edgeinfer.cli.main import main; sys.exit(main())"
)


def llama_bench(model: Path, threads: int, rounds: int) -> dict[str, list[float]]:
    """The rates of llama-bench (tokens/s), by test. Raises SystemExit if it is missing."""
    program = peer_program("llama-bench")
    if program is None:
        raise SystemExit("error: llama-bench is missing\n\nhint: tools/setup.sh bench fetches it")
    numbers = {"-t": threads, "-r": rounds, "-ub": UBATCH, "-p": 512, "-n": 128}
    options = [str(word) for pair in numbers.items() for word in pair]
    command = [program, "-m", str(model), "-o", "json", *options]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {TESTS[0] if row["n_prompt"] else TESTS[1]: row["samples_ts"] for row in rows}


def own_timings(port: int, rounds: int) -> dict[str, list[float]]:
    """Return what llama-server itself says of such requests (tokens/s), by test."""
    rates: dict[str, list[float]] = {test: [] for test in TESTS}
    asked = {"pp512": (" word" * 510, 1, "prompt"), "tg128": (" one, two, three,", 129, "predicted")}
    for number, (test, (text, most, which)) in itertools.product(range(rounds), asked.items()):
        body = {"prompt": f"{number}{text}", "n_predict": most, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"http://127.0.0.1:{port}/completion", json=body, timeout=600)
        timings = answer.raise_for_status().json()["timings"]
        n = timings[f"{which}_n"] - (which == "predicted")  # its time begins with the first token
        rates[test].append(n / timings[f"{which}_ms"] * 1000)
    return rates


def measure(model: Path, threads: int, rounds: int) -> list[list[str]]:
    """Measure all sides; a row for each."""
    before = llama_bench(model, threads, rounds)
    theirs = peer_program("llama-server") or ""
    with contextlib.ExitStack() as stack:
        flags = ["-ub", str(UBATCH)]
        peer = peer_server.Server(theirs, model, slots=1, n_ctx=N_CTX, threads=threads, flags=flags)
        stack.callback(peer.close)
        own = own_timings(peer.port, rounds)
        ports = {"llama-server": peer.port}
        loaded = ["--threads", str(threads), "--ctx", str(N_CTX)]
        for side, command in (
            ("ours as --against", CLI),
            ("ours, llama.cpp's kernels", [*CLI[:2], OFF]),
        ):
            ports[side] = port = free_port()
            serve = [*command, "serve", str(model), "--log", "off", "--port", str(port), *loaded]
            wait_healthy(port, stack.enter_context(process(serve)))
        against = [
            word for port in ports.values() for word in ("--against", f"http://127.0.0.1:{port}")
        ]
        bench = [*CLI, "bench", str(model), "--json", "-r", str(rounds), *loaded, *against]
        found = json.loads(subprocess.run(bench, check=True, stdout=subprocess.PIPE).stdout)["result"]
    after = llama_bench(model, threads, rounds)
    both = {test: before[test] + after[test] for test in TESTS}
    names = dict.fromkeys(row["side"] for row in found["rows"])
    sides = dict(zip(names, ["ours", *ports], strict=True))
    rates = {
        side: {row["test"]: row["samples"] for row in found["rows"] if row["side"] == name}
        for name, side in sides.items()
    }
    every = {"llama-bench": both, "llama-server, by its own timings": own, **rates}
    return [_row(side, one, both) for side, one in every.items()]


def _row(side: str, rates: dict[str, list[float]], reference: dict[str, list[float]]) -> list[str]:
    cells = [side]
    for test in TESTS:
        middle = statistics.median(rates[test])
        difference = middle / statistics.median(reference[test]) - 1
        cells += [f"{middle:.1f} ({min(rates[test]):.1f}–{max(rates[test]):.1f})", f"{difference:+.1%}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    add_out(parser)
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    head = ["model", "side"] + [
        cell for test in TESTS for cell in (f"{test}, tokens/s", "to llama-bench")
    ]
    rows = []
    for name in options.models:
        print(name, file=sys.stderr, flush=True)
        rows += [[name, *row] for row in measure(model_path(name), options.threads, options.rounds)]
    print(write_figure(options.out, "bench-method", markdown(head, rows)))


if __name__ == "__main__":
    main()
