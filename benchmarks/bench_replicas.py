"""Gain and cost of replicas of a model in one endpoint: `make bench-replicas`.

    make bench-replicas ARGS='--configurations 1x2 2x1 2x2 --rounds 3 --out docs/figures'

REPLICASxTHREADS: number of replicas, and threads of each. Sixteen clients repeatedly request --tokens
tokens; the configurations take turns, and each begins with a new, resumed endpoint.
"""

from __future__ import annotations

import argparse
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
from bench_serve import process, wait_healthy
from common import add_out, free_port, memory_of, model_of, model_path, tree_of, write_figure
from peer_server import EDGEINFER, ask

CLIENTS = 16


@contextmanager
def endpoint(name: str, replicas: int, threads: int) -> Iterator[tuple[int, int]]:
    """Yield an endpoint with all its replicas: its port, and its launcher's pid."""
    port = free_port()
    flags = ["--port", str(port), "--threads", str(replicas * threads), "--log", "off"]
    with process([*EDGEINFER, "serve", name, *flags, "--replicas", str(replicas)]) as started:
        wait_healthy(port, started)
        time.sleep(1)  # for the later replicas, each of which is resumed within a tenth of a second
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
    rates: dict[tuple[int, int], list[float]] = {configuration: [] for configuration in configurations}
    sizes: dict[tuple[int, int], list[int]] = {configuration: [] for configuration in configurations}
    for _ in range(rounds):
        for configuration in configurations:
            with endpoint(name, *configuration) as (port, pid):
                rates[configuration].append(rate(port, name, seconds, tokens))
                sizes[configuration].append(sum(memory_of(below, "Pss") for below in tree_of(pid)))
                print(
                    configuration, rates[configuration][-1], sizes[configuration][-1], file=sys.stderr
                )
    rows = [
        f"| {replicas} | {threads} | {statistics.median(samples):.0f} | {min(samples):.0f}–{max(samples):.0f}"
        f" | {statistics.median(sizes[replicas, threads]) / 1e6:.0f} MB |"
        for (replicas, threads), samples in rates.items()
    ]
    return "\n".join(
        [
            f"| replicas of {name} | threads each | tokens/s, {CLIENTS} clients | range | memory (PSS) of all |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def configuration(text: str) -> tuple[int, int]:
    """Return replicas and threads of `2x1`."""
    replicas, threads = text.split("x")
    return int(replicas), int(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    default = [(1, cores), (2, max(1, cores // 2)), (4, max(1, cores // 4))]
    parser.add_argument("--configurations", type=configuration, nargs="+", default=default)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--models", type=Path, help="folder in which random models are made and kept")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-replicas-") as work:
        os.environ["EDGEINFER_HOME"] = work
        model = model_of(options.shape, model_path("smollm2"), options.models or Path(work))
        for arguments in (
            ["pull", str(model), "--name", options.shape, "--in-place"],
            ["warm", options.shape],
        ):
            subprocess.run([*EDGEINFER, *arguments, "--quiet"], check=True)
        table = measure(
            options.shape, options.configurations, options.rounds, options.seconds, options.tokens
        )
        print(write_figure(options.out, "replicas", table))


if __name__ == "__main__":
    main()
