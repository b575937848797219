"""From no replica to one on Ray Serve, and what replicas of a model cost and give.

    make bench-scale ARGS='--shapes small,7b --runs 5 --out docs/figures'
    make bench-scale ARGS='--shapes 7b --home FOLDER --prepare'     # the models and snapshots alone, for later

An application on a local Ray cluster loses its only replica, then is asked: the time from that request to
its first token. The sides take turns: replicas that resume a snapshot of their node, replicas that load
the model, and the same application over `llama-server`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import ray
from common import add_out, free_port, model_path, peer_program, spread, tree_of, write_figure
from memory_restart import model_of
from memory_sides import ask
from ray import serve

from edgeinfer.cluster.app import ModelDeployment, application
from edgeinfer.cluster.messages import ModelSettings
from edgeinfer.cluster.replica import EndpointReplica

#: What was published of serving from nothing, a 15 GB model on other hardware: with a warmed cache, without.
SEEDS_S = (50.1, 265.3)
CLIENTS, TOKENS = 16, 48


class Peer(EndpointReplica):
    """`llama-server` in the place of our endpoint. `serve` of the settings is its program and the file."""

    def start(self, path: str, settings: ModelSettings) -> subprocess.Popen[bytes]:
        program, model = settings.serve
        words = ["-m", model, "--host", path, "-t", str(settings.cpus), "-np", "4", "--no-webui"]
        return subprocess.Popen([program, *words], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def is_healthy(self) -> bool:
        try:
            return await super().is_healthy()
        except httpx2.TransportError:
            return False


class PeerDeployment(ModelDeployment):
    """A replica of `llama-server`."""

    replica = Peer


def sides(name: str, model: Path) -> dict[str, tuple[dict[str, Any], type[ModelDeployment]]]:
    """Return the settings of each side."""
    ours = {"model": name, "idle_s": 1, "cpus": 2}
    found: dict[str, tuple[dict[str, Any], type[ModelDeployment]]] = {
        "a snapshot on the node": (ours, ModelDeployment),
        "no snapshot": (ours | {"serve": ["--resume", "never"]}, ModelDeployment),
    }
    server = peer_program("llama-server")
    if server:
        found["`llama-server`"] = (ours | {"serve": [server, str(model)]}, PeerDeployment)
    return found


def from_zero(name: str, model: Path, port: int, runs: int) -> list[str]:
    """Rows of the table: seconds from a request to its first token where no replica runs."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        for side, (settings, of) in sides(name, model).items():
            serve.run(application(settings, of))
            first_s = ask(port, [{"role": "user", "content": "Hi"}], n=2, model=name).first_s
            found.setdefault(side, []).append(first_s)
            print(f"{name}: {side}: {first_s:.2f} s", file=sys.stderr)
            serve.delete("default")
    return [f"| {name}: {side} | {spread(seconds, 's', 2)} |" for side, seconds in found.items()]


def replicas(name: str, port: int, counts: tuple[int, ...]) -> list[str]:
    """Rows of the table: tokens a second of all clients together, and memory, by replicas."""
    rows = []
    for count in counts:
        serve.run(application({"model": name, "min_replicas": count, "max_replicas": count, "cpus": 1}))
        _at_once(port, name, 2)
        begun = time.perf_counter()
        tokens = _at_once(port, name, TOKENS)
        rate = tokens / (time.perf_counter() - begun)
        rows.append(f"| {count} | {rate:.0f} | {_endpoints_pss() / 1e6:.0f} MB |")
        serve.delete("default")
    return rows


def _at_once(port: int, name: str, n: int) -> int:
    done: list[int] = []

    def client(number: int) -> None:
        said = [{"role": "user", "content": f"Tell me story number {number}."}]
        answer = ask(port, said, n=n, model=name, ignore_eos=True)
        done.append(int(answer.usage["completion_tokens"]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


def _endpoints_pss() -> int:
    """Bytes of all that replicas started, shared pages counted once among them."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ServeReplica:default:" not in (folder / "cmdline").read_bytes():
                continue
            below = tree_of(int(folder.name))[1:]
            found += sum(_pss(pid) for pid in below)
        except OSError:
            continue
    return found


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def with_ray(port: int, work: Callable[[], str]) -> str:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        return work()
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", default="small,7b")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--models", type=Path, help="where random models are made and kept")
    parser.add_argument("--home", type=Path, help="where --prepare has pulled and warmed, or shall")
    parser.add_argument("--prepare", action="store_true", help="only pull and warm")
    parser.add_argument("--name", default="scale", help="the name of the file")
    add_out(parser)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as work:
        os.environ |= {"EDGEINFER_HOME": str(options.home or work), "RAY_USAGE_STATS_ENABLED": "0"}
        models = {
            shape: model_of(shape, model_path("smollm2"), options.models or Path(work))
            for shape in options.shapes.split(",")
        }
        for name, model in models.items() if options.prepare or not options.home else ():
            for words in (["pull", str(model), "--name", name, "--in-place"], ["warm", name]):
                subprocess.run([sys.executable, "-m", "edgeinfer", *words, "--quiet"], check=True)
        if options.prepare:
            return

        def measured() -> str:
            zero = [
                row
                for name, model in models.items()
                for row in from_zero(name, model, port, options.runs)
            ]
            several = replicas(next(iter(models)), port, tuple(options.replicas))
            heads = f"| replicas of {next(iter(models))}, a core each | tokens/s, {CLIENTS} clients | memory (PSS) of all |"
            return "\n".join(
                [
                    "| no replica → one: request → first token | median (range) |",
                    "|---|---|",
                    *zero,
                    f"| published, a 15 GB model on other hardware: warmed cache, none | {SEEDS_S[0]} s, {SEEDS_S[1]} s |",
                    *(["", heads, "|---|---|---|", *several] if several else []),
                    "",
                ]
            )

        print(write_figure(options.out, options.name, with_ray(port, measured)))


if __name__ == "__main__":
    main()
