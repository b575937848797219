"""Gain and cost of replicas of a model in one endpoint: `make bench-replicas`.

    make bench-replicas ARGS='--configurations 1x2 2x1 2x2 --rounds 3 --out docs/figures'

REPLICASxTHREADS: number of replicas, and threads of each. Sixteen clients repeatedly request --tokens
tokens; the configurations take turns, and each begins with a new, resumed endpoint.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    free_port,
    make_parser,
    memory_of,
    model_of,
    model_path,
    process,
    tree_of,
    wait_healthy,
    write_figure,
)
from peer_server import EDGEINFER, ask

from edgeinfer.bench import markdown

CLIENTS = 16


@contextmanager
def endpoint(name: str, replicas: int, threads: int) -> Iterator[tuple[int, int]]:
    """Yield an endpoint with all its replicas: its port, and its launcher's pid."""
    port = free_port()
    flags = ["--port", str(port), "--threads", str(replicas * threads), "--log", "off"]
    with process([*EDGEINFER, "serve", name, *flags, "--replicas", str(replicas)]) as started:
        wait_healthy(port, started)
        time.sleep(1)  # until all replicas run: each is resumed within a tenth of a second
        yield port, started.pid


def rate(port: int, name: str, seconds: float, n: int) -> float:
    """Return the tokens/s of all clients together; each client's first answer is not counted."""
    done: list[tuple[float, int]] = []
    warm = threading.Barrier(CLIENTS + 1)
    deadline = float("inf")

    def client(number: int) -> None:
        said = [{"role": "user", "content": f"Tell me story number {number}."}]
        ask(port, said, n=2, model=name, ignore_eos=True)
        warm.wait()
        while time.perf_counter() < deadline:
            answer = ask(port, said, n=n, model=name, ignore_eos=True)
            done.append((time.perf_counter(), int(answer.usage["completion_tokens"])))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    warm.wait()
    began = time.perf_counter()
    deadline = began + seconds
    for thread in threads:
        thread.join()
    return sum(tokens for _, tokens in done) / (max(ended_s for ended_s, _ in done) - began)


def measure(
    name: str, configurations: list[tuple[int, int]], rounds: int, seconds: float, tokens: int
) -> str:
    """Measure all configurations; return the table."""
    samples: dict[tuple[int, int], list[tuple[float, int]]] = {pair: [] for pair in configurations}
    for _ in range(rounds):
        for configuration in configurations:
            with endpoint(name, *configuration) as (port, pid):
                tokens_per_s = rate(port, name, seconds, tokens)
                size = sum(memory_of(below, "Pss") for below in tree_of(pid))
                samples[configuration].append((tokens_per_s, size))
                print(configuration, tokens_per_s, size, file=sys.stderr)
    rows = []
    for configuration, measured in samples.items():
        rates, sizes = zip(*measured, strict=True)
        cells = (f"{statistics.median(rates):.0f}", f"{min(rates):.0f}–{max(rates):.0f}")
        rows.append([*map(str, configuration), *cells, f"{statistics.median(sizes) / 1e6:.0f} MB"])
    head = [f"replicas of {name}", "threads each", f"tokens/s, {CLIENTS} clients", "range"]
    return markdown([*head, "memory (PSS) of all"], rows)


def configuration(text: str) -> tuple[int, int]:
    """Return replicas and threads of `2x1`."""
    replicas, threads = text.split("x")
    return int(replicas), int(threads)


def main() -> None:
    parser = make_parser(__doc__)
    cores = len(os.sched_getaffinity(0))
    default = [(1, cores), (2, max(1, cores // 2)), (4, max(1, cores // 4))]
    parser.add_argument("--configurations", type=configuration, nargs="+", default=default)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--models", type=Path, help="folder in which random models are made and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-replicas-") as work:
        os.environ["EDGEINFER_HOME"] = work
        model = model_of(options.shape, model_path("smollm2"), options.models or Path(work))
        pull = ["pull", str(model), "--name", options.shape, "--in-place"]
        for arguments in (pull, ["warm", options.shape]):
            subprocess.run([*EDGEINFER, *arguments, "--quiet"], check=True)
        limits = (options.rounds, options.seconds, options.tokens)
        table = measure(options.shape, options.configurations, *limits)
        print(write_figure(options.out, "replicas", table))


if __name__ == "__main__":
    main()
