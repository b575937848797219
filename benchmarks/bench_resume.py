"""Launches of a warm model, whole processes timed from exec, compared with a cold start and
`llama-server`.

    bench_resume.py [--models small,7b,14b] [--runs 10] [--parts resumed,cold,… [--keep]] [--out
    bench-out]

Sides alternate run by run. Medians and the spread (least to greatest) go to bench-out/resume.md and
resume.json. The models of 7B shape have random weights (`random_gguf.py`) and are removed afterwards,
unless --model-folder names a folder for them. Root is not needed; as root, the page cache is dropped
for the cold figures, if that is allowed.

Stages, in milliseconds from exec: `launcher`: its main runs; `restore`: CRIU is started; `running`:
Python runs in the resumed process; `request`: it has the launch's request; `first token`: by the
launch's own clock; `exit`: the process has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import (
    call,
    describe,
    drop,
    make_parser,
    memory_of,
    model_path,
    peer_program,
    process,
    summary,
    tree_of,
    wait_healthy,
    write_figure,
)

from edgeinfer.bench import markdown
from edgeinfer.platform.machine import read_memory

EDGEINFER = str(Path(sys.executable).parent / "edgeinfer")
MODELS = {"small": 0, "7b": 32, "14b": 64}
PROMPT = "Name three colours."
#: A prompt of one token for these models, whose first token needs hardly any prefill.
ONE_TOKEN = "Hello"
STAGES = ("launcher", "restore", "running", "request", "first_token")


class Bench:
    """The measurements, in a separate home with the models."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.models = Path(options.model_folder) if options.model_folder else work / "models"
        self.environment = os.environ | {"EDGEINFER_HOME": str(work / "home")}
        self.server = peer_program("llama-server")
        self.results: dict[str, Any] = {"models": {}}
        if options.keep:
            self.results = json.loads((options.out / "resume.json").read_text())

    def edgeinfer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        command = [EDGEINFER, *arguments]
        return subprocess.run(command, env=self.environment, check=False, timeout=900, **streams)

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.edgeinfer(*arguments, "--json")
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: {done.stdout} {done.stderr}")
        return json.loads(done.stdout)["result"]

    # --- one model

    def measure(self, name: str) -> None:
        model = self._model(name)
        self.edgeinfer("pull", str(model), "--name", name, "--in-place", "--quiet")
        figures: dict[str, Any] = {"file_bytes": model.stat().st_size}
        warm = self.json("warm", name, "--quiet")
        figures["snapshot"] = {
            k: warm["snapshot"][k] for k in ("memory_bytes", "disk_bytes", "images_bytes", "mappings")
        }
        figures = self.results["models"].setdefault(name, {}) | figures
        self.results["models"][name] = figures
        self._launch(name)  # from here on the page cache is hot
        few = max(3, self.options.runs // 3) if MODELS[name] else self.options.runs
        parts: dict[str, Callable[[], Any]] = {
            "resumed": lambda: medians([self._launch(name) for _ in range(self.options.runs)]),
            "one_token": lambda: self._one_token(name, model, few),
            "cold": lambda: medians([self._launch(name, "--resume=never") for _ in range(few)]),
            "memory": lambda: self._memory(name),
            "decode": lambda: self._decode(name),
            "cold_cache": lambda: self._cold_cache(name, model),
            "warm": lambda: self._warm(name, figures["snapshot"]["disk_bytes"]),
        }
        for measurement in self.options.parts.split(","):
            figures[measurement] = parts[measurement]()
            self.write()
        self.edgeinfer("snapshots", "rm", name)

    def write(self) -> None:
        """Write the results after every part, so that an interrupted run keeps them."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "resume.json").write_text(json.dumps(self.results, indent=1))
        write_figure(self.options.out, "resume", table(self.results))

    def _model(self, name: str) -> Path:
        tokenizer = self.options.small or model_path("smollm2")
        if not MODELS[name]:
            return tokenizer
        out = self.models / f"random-{name}.gguf"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            program = [sys.executable, Path(__file__).with_name("random_gguf.py"), tokenizer, out]
            subprocess.run([*program, "--layers", str(MODELS[name])], check=True)
            os.sync()  # so that its pages are not written while launches are measured
        return out

    def _launch(self, name: str, *more: str, tokens: int = 4, prompt: str = PROMPT) -> dict[str, float]:
        arguments = ("run", name, prompt, "--temperature", "0", "--max-tokens", str(tokens), *more)
        began = time.monotonic()
        result = self.json(*arguments)
        exit_ms = (time.monotonic() - began) * 1000
        stages = dict(result["start"]["stages_ms"])
        expected = "cold" if "--resume=never" in more else "resumed"
        if result["start"]["how"] != expected:
            raise SystemExit(f"{name} was not {expected}: {result['start']}")
        stages["ttft"] = result["timings"]["ttft_ms"]
        stages["prompt_tokens"] = result["usage"]["prompt_tokens"] - result["usage"]["cached_tokens"]
        decoded = result["usage"]["completion_tokens"] - 1
        stages["step"] = result["timings"]["decode_ms"] / decoded if decoded > 0 else 0.0
        # Loading happens between the request and the submission, so the first token is counted back
        # from the exit.
        stages["first_token"] = exit_ms - result["timings"]["decode_ms"]
        stages["exit"] = exit_ms
        return stages

    def _one_token(self, name: str, model: Path, few: int) -> dict[str, Any]:
        """Time a prompt of one token, by edgeinfer and by llama-server started in two ways, in turn."""
        ways = {"default": (), "no-repack, no-warmup": ("--no-repack", "--no-warmup")}
        if not self.server:
            ways = {}
        runs: dict[str, list[dict[str, float]]] = {"ours": [], **{way: [] for way in ways}}
        for n in range(self.options.runs):
            runs["ours"].append(self._launch(name, "--raw", prompt=ONE_TOKEN))
            for way, flags in ways.items():
                if n < few:
                    runs[way].append(self._peer(model, *flags))
        return {way: medians(values) for way, values in runs.items()}

    def _decode(self, name: str) -> dict[str, float]:
        """Time steady decode steps of a resumed and of a freshly loaded process, which both run and
        take turns, without draft tokens. A pair takes seconds, so disturbances by the machine affect
        both.
        """
        steps: dict[str, list[float]] = {"resumed": [], "fresh": []}
        ports = {"resumed": 18310, "fresh": 18311}
        fields = {"max_tokens": self.options.tokens, "temperature": 1, "speculative": "off"}
        with (
            self._endpoint(name, ports["resumed"], "--resume=always"),
            self._endpoint(name, ports["fresh"], "--resume=never"),
        ):
            for port in ports.values():
                _complete(port)
            for n in range(15):
                for side in sorted(steps, reverse=bool(n % 2)):
                    timings = _complete(ports[side], **fields)["timings"]
                    steps[side].append(timings["predicted_per_token_ms"])
        ratios = [fresh / resumed for resumed, fresh in zip(*steps.values(), strict=True)]
        medians = {f"{side}_step_ms": statistics.median(values) for side, values in steps.items()}
        return medians | summary(ratios)

    def _warm(self, name: str, size: int) -> dict[str, float]:
        """Compare `warm` with a cold start and writing as many bytes; medians in seconds of three
        rounds, and warm's range.

        The order alternates. Before each step, as much memory as it needs is allocated and freed: a
        virtual machine returns memory that was free for seconds to its host, and gets it back at only
        half a gigabyte per second here.
        """
        steps: list[tuple[str, Callable[[], float]]] = [
            ("wall_s", lambda: self.json("warm", name, "--quiet")["wall_s"]),
            ("cold_s", lambda: self._launch(name, "--resume=never")["first_token"] / 1000),
            ("write_s", lambda: self._write_s(size)),
        ]
        durations_s: dict[str, list[float]] = {key: [] for key, _ in steps}
        for n in range(len(steps)):
            for key, step in steps[n:] + steps[:n]:
                _touch(min(3 * size, read_memory().available_bytes // 2))
                durations_s[key].append(step())
        medians_s = {key: statistics.median(values) for key, values in durations_s.items()}
        ratio = medians_s["wall_s"] / (medians_s["cold_s"] + medians_s["write_s"])
        return medians_s | {"ratio": ratio} | summary(durations_s["wall_s"])

    def _write_s(self, size: int) -> float:
        """Return the seconds to write `size` bytes to a new file of this disk, synced."""
        path, block = self.work / "written", os.urandom(4 << 20)
        began = time.monotonic()
        with open(path, "wb") as file:
            for _ in range(-(-size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        took = time.monotonic() - began
        path.unlink()
        return took

    def _memory(self, name: str) -> dict[str, float]:
        """Measure an idle resumed process, then one and four that have answered, by PSS, which counts
        shared pages once.
        """
        with self._waiting(name) as idle:
            private = sum(memory_of(pid, "Anonymous") for pid in tree_of(idle.pid))
        pss = {}
        for copies in (1, 4):
            with contextlib.ExitStack() as stack:
                endpoints = [
                    stack.enter_context(self._endpoint(name, 18300 + n)) for n in range(copies)
                ]
                for n in range(copies):
                    _complete(18300 + n)
                pss[copies] = sum(memory_of(pid, "Pss") for e in endpoints for pid in tree_of(e.pid))
        return {
            "idle_private_bytes": private,
            "one_pss_bytes": pss[1],
            "four_pss_bytes": pss[4],
            "four_to_one": pss[4] / pss[1],
        }

    @contextlib.contextmanager
    def _waiting(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        command = [EDGEINFER, "run", name, "--max-tokens", "1"]
        waiting = subprocess.Popen(command, env=self.environment, **pipes)
        while "edgeinfer" not in [
            Path(f"/proc/{pid}/comm").read_text().strip() for pid in tree_of(waiting.pid)[2:]
        ]:
            time.sleep(0.02)
        time.sleep(0.5)
        yield waiting
        waiting.communicate(b"Hi")

    @contextlib.contextmanager
    def _endpoint(self, name: str, port: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [EDGEINFER, "serve", name, "--port", str(port), "--log", "off", *more]
        with process(command, env=self.environment, stderr=None) as serving:
            wait_healthy(port, serving, 120)
            yield serving

    def _peer(self, model: Path, *flags: str) -> dict[str, float]:
        command = [self.server, "-m", model, "--port", "18390", "-c", "4096", *flags]
        began = time.monotonic()
        with process(command) as server:
            wait_healthy(18390, server)
            healthy = (time.monotonic() - began) * 1000
            _complete(18390)
            return {"healthy": healthy, "first_token": (time.monotonic() - began) * 1000}

    def _cold_cache(self, name: str, model: Path) -> dict[str, Any]:
        """Time launches with nothing of model and snapshot in the page cache, and reading only the
        snapshot.
        """
        snapshots = Path(self.environment["EDGEINFER_HOME"]) / "cache/snapshots"
        files = [model, *(path for path in snapshots.rglob("*") if path.is_file())]
        launches, reads = [], []
        for _ in range(3):
            drop(files)
            launches.append(self._launch(name))
            drop(files)
            began = time.monotonic()
            for path in files[1:]:
                with open(path, "rb", buffering=0) as file:
                    while file.read(8 << 20):
                        pass
            reads.append({"read": (time.monotonic() - began) * 1000})
        return medians(launches) | medians(reads)


def _touch(size: int) -> None:
    """Allocate and free `size` bytes of memory."""
    area = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    for offset in range(0, len(area), mmap.PAGESIZE):
        area[offset] = 1
    area.close()


def _complete(port: int, **more: float | str) -> Any:
    """Request a completion over HTTP, by default of one token."""
    body = {"prompt": ONE_TOKEN, "max_tokens": 1, "temperature": 0} | more
    return call(port, "/v1/completions", body)


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the `summary` of each name over the runs, rounded."""
    return {
        name: {key: round(value, 1) for key, value in summary([run[name] for run in runs]).items()}
        for name in runs[0]
    }


def first_token(launches: dict[str, Any]) -> str:
    """Describe the time to the first token, with the tokens to prefill."""
    return f"{describe(launches['first_token'], 'ms')}, {launches['prompt_tokens']['median']:.0f}"


#: Title of a row → the cell of a model's figures.
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model file": lambda f: f"{f['file_bytes'] / 1e9:.2f} GB",
    "exec → launcher's main": lambda f: describe(f["resumed"]["launcher"], "ms"),
    "exec → CRIU started": lambda f: describe(f["resumed"]["restore"], "ms"),
    "exec → Python runs again": lambda f: describe(f["resumed"]["running"], "ms"),
    "exec → **running with its request**": lambda f: describe(f["resumed"]["request"], "ms"),
    "exec → **first token**, a prompt of one token": lambda f: describe(
        f["one_token"]["ours"]["first_token"], "ms"
    ),
    "`llama-server`, the same": lambda f: describe(f["one_token"]["default"]["first_token"], "ms"),
    "`llama-server --no-repack --no-warmup`, the same": lambda f: describe(
        f["one_token"]["no-repack, no-warmup"]["first_token"], "ms"
    ),
    "exec → first token, a chat's prompt (tokens to prefill)": lambda f: first_token(f["resumed"]),
    "the same, cold start": lambda f: first_token(f["cold"]),
    "the same, resumed, nothing in the page cache": lambda f: describe(
        f["cold_cache"]["first_token"], "ms"
    ),
    "reading the snapshot from this disk": lambda f: describe(f["cold_cache"]["read"], "ms"),
    "one decode step, resumed": lambda f: f"{f['decode']['resumed_step_ms']:.1f} ms",
    "one decode step, freshly loaded": lambda f: f"{f['decode']['fresh_step_ms']:.1f} ms",
    "decode rate, resumed : fresh": lambda f: describe(f["decode"], "", 3),
    "private memory, idle": lambda f: f"{f['memory']['idle_private_bytes'] / 1e6:.0f} MB",
    "four copies : one (PSS)": lambda f: f"{f['memory']['four_to_one']:.2f}",
    "snapshot on disk": lambda f: f"{f['snapshot']['disk_bytes'] / 1e6:.0f} MB",
    "`warm`": lambda f: describe(f["warm"], "s", 1),
    "`warm` : cold start and writing as much": lambda f: f"{f['warm']['ratio']:.2f}",
}


def table(results: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""

    def cell(figures: dict[str, Any], pick: Callable[[dict[str, Any]], str]) -> str:
        with contextlib.suppress(KeyError, TypeError):
            return pick(figures)
        return "–"

    models = results["models"]
    rows = [[title, *(cell(models[name], pick) for name in models)] for title, pick in ROWS.items()]
    return markdown(["", *models], rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--small", type=Path, help="the small model; left out: the tests'")
    parser.add_argument("--models", default="small,7b,14b")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a steady decode")
    every = "resumed,one_token,cold,memory,decode,cold_cache,warm"
    parser.add_argument("--parts", default=every, help="parts to measure")
    keep = "keep results of other models and parts in --out"
    parser.add_argument("--keep", action="store_true", help=keep)
    folder = "folder of the random models; by default they are removed"
    parser.add_argument("--model-folder", help=folder)
    work = "folder with space for models and snapshots, not on tmpfs"
    parser.add_argument("--work", default=None, help=work)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-resume-", dir=options.work) as work:
        bench = Bench(options, Path(work))
        for name in options.models.split(","):
            bench.measure(name)
        bench.write()
        print(table(bench.results))


if __name__ == "__main__":
    main()
