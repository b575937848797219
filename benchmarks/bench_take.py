"""A snapshot taken of an endpoint that is busy: what its streams notice, and how long it takes.

    make bench-take ARGS='--models small,7b --runs 3 --out docs/figures'

Eight greedy streams run on an endpoint that was resumed from its snapshot. Undisturbed runs and runs with
`edgeinfer snapshots take --name` beside them take turns. A gap is the time between two pieces of one
stream; what is told is the longest of all streams, from all streams' first token on until the take has
ended (undisturbed: for as long). Company rounds otherwise in long texts (decision 022), so texts are compared
among undisturbed runs too. The model of 7B shape has random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import add_out, free_port, is_healthy, model_path, spread, write_figure

HERE = Path(__file__).parent
#: Layers of a model, and the tokens of each stream.
MODELS = {"small": (0, 400), "7b": (32, 120)}
STREAMS = 8
TAKEN = "bench-take"
CACHE = ("--kv-type", "q8_0")


class Stream(threading.Thread):
    """One greedy stream: its pieces, and when each came."""

    def __init__(self, port: int, model: str, number: int, n_tokens: int) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.times: list[float] = []
        self._port = port
        self._body = {
            "model": model, "prompt": f"Chapter {number}. Once upon a time", "max_tokens": n_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False,
        }  # fmt: skip

    def run(self) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        link.request(
            "POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"}
        )
        for line in link.getresponse():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                self.pieces += [choices[0].get("text", "")] if choices else []
                self.times.append(time.monotonic())
        link.close()

    def gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between its pieces of that time."""
        times = [at for at in self.times if began <= at <= ended]
        return [b - a for a, b in pairwise(times)]


class Bench:
    """A home of its own, an endpoint in it, and what was measured."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.environment = os.environ | {"EDGEINFER_HOME": str(work / "home")}
        self.rows: dict[str, dict[str, Any]] = {}

    def edgeinfer(self, *words: str) -> dict[str, Any]:
        """The result of a command. Raises SystemExit when it fails."""
        command = [str(Path(sys.executable).parent / "edgeinfer"), *words, "--json"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout} {done.stderr}")
        return json.loads(done.stdout)["result"]

    def measure(self, name: str) -> None:
        model = self._model(name)
        self.edgeinfer("pull", str(model), "--name", name, "--in-place", "--quiet")
        self.edgeinfer("warm", name, *CACHE, "--quiet")
        found: dict[str, Any] = {"plain": [], "beside": [], "idle_s": [], "busy_s": []}
        found |= {"equal": [], "equal_plain": []}
        first, _, _ = self._run(name, taking=False)
        for _ in range(self.options.runs):
            with self._served(name):
                found["idle_s"].append(self._take(name))
            beside, began, ended = self._run(name, taking=True)
            plain, since, _ = self._run(name, taking=False)
            found["busy_s"].append(ended - began)
            found["beside"].append(self._noticed(beside, began, ended))
            found["plain"].append(self._noticed(plain, since, since + ended - began))
            found["equal"].append(_n_equal(beside, first))
            found["equal_plain"].append(_n_equal(plain, first))
            found["was_streaming"] = ended < min(stream.times[-1] for stream in beside)
            print(name, json.dumps(found), flush=True)
            self.rows[name] = found

    @contextlib.contextmanager
    def _served(self, name: str) -> Iterator[int]:
        """An endpoint with an empty cache; its port."""
        port = free_port()
        command = [str(Path(sys.executable).parent / "edgeinfer"), "serve", name, "--port", str(port)]
        command += CACHE
        with (self.work / "serve.log").open("wb") as log:
            served = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        try:
            while not is_healthy(port):
                time.sleep(0.1)
            yield port
        finally:
            served.terminate()
            served.wait()

    def _take(self, name: str) -> float:
        """Seconds of a take while nothing else runs, or beside the streams that do."""
        began = time.monotonic()
        self.edgeinfer("snapshots", "take", "--name", TAKEN, "--quiet")
        took = time.monotonic() - began
        self.edgeinfer("snapshots", "rm", f"{name},{TAKEN}")
        return took

    def _run(self, name: str, *, taking: bool) -> tuple[list[Stream], float, float]:
        with self._served(name) as port:
            streams = [Stream(port, name, number, MODELS[name][1]) for number in range(STREAMS)]
            for stream in streams:
                stream.start()
            while not all(len(stream.times) > 1 for stream in streams):
                time.sleep(0.01)
            began = time.monotonic()
            ended = began + (self._take(name) if taking else 0.0)
            for stream in streams:
                stream.join()
        return streams, began, ended

    def _noticed(self, streams: Sequence[Stream], began: float, ended: float) -> dict[str, float]:
        gaps = sorted(gap for stream in streams for gap in stream.gaps(began, ended))
        return {
            "longest_ms": gaps[-1] * 1000,
            "median_ms": statistics.median(gaps) * 1000,
            "p99_ms": gaps[int(0.99 * (len(gaps) - 1))] * 1000,
        }

    def _model(self, name: str) -> Path:
        tokenizer = model_path("smollm2")
        n_layers = MODELS[name][0]
        if not n_layers:
            return tokenizer
        out = Path(self.options.model_folder or self.work) / f"random-{name}.gguf"
        if not out.exists():
            script = [sys.executable, str(HERE / "random_gguf.py"), str(tokenizer), str(out)]
            subprocess.run([*script, "--layers", str(n_layers)], check=True)
        return out


def _n_equal(one: Sequence[Stream], other: Sequence[Stream]) -> int:
    """Count the streams with equal texts, to the last token."""
    return sum("".join(a.pieces) == "".join(b.pieces) for a, b in zip(one, other, strict=True))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Write the table, a column a model."""

    def line(title: str, cell: Any) -> str:
        return f"| {title} | " + " | ".join(cell(found) for found in rows.values()) + " |"

    def of(side: str, what: str) -> Any:
        return lambda found: spread([run[what] for run in found[side]], "ms")

    def of_all(what: str) -> Any:
        return lambda found: f"{sum(found[what])} of {STREAMS * len(found[what])}"

    return "\n".join(
        [
            f"| {STREAMS} greedy streams | " + " | ".join(rows) + " |",
            "|---|" + "---|" * len(rows),
            line("longest gap of a stream, undisturbed", of("plain", "longest_ms")),
            line("longest gap of a stream, **beside a take**", of("beside", "longest_ms")),
            line("median gap, undisturbed", of("plain", "median_ms")),
            line("median gap, beside a take", of("beside", "median_ms")),
            line("texts as undisturbed, of all", of_all("equal")),
            line("the same of other undisturbed runs", of_all("equal_plain")),
            line("a take, nothing else running", lambda found: spread(found["idle_s"], "s", 1)),
            line("a take beside the streams", lambda found: spread(found["busy_s"], "s", 1)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="small,7b", help="of small and 7b, with commas")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model-folder", help="where the made model lies, and stays")
    parser.add_argument(
        "--work", help="folder for models and snapshots, 15 GB; left out: the usual one"
    )
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        bench = Bench(options, Path(work))
        for name in options.models.split(","):
            bench.measure(name)
    print(write_figure(options.out, "take", table(bench.rows)))


if __name__ == "__main__":
    main()
