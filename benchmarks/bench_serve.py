"""The endpoint under load, beside llama-server in the same run, and beside the engine without HTTP.

    python benchmarks/bench_serve.py [--widths 1,4,8,16,32] [--rounds 3] [--tokens 48] [--sections
    load,start,switch]

`load`: closed-loop clients over a real socket, streaming chat completions of a fixed length; sides
alternate, medians and spread over the rounds. The third side is our engine driven in its own process by
the same schedule: what HTTP adds is the difference. All sides stay loaded, and asleep while another is
measured; all have our setting of libgomp's spin count (docs/decisions/002-spin-count.md), unless
GOMP_SPINCOUNT says otherwise. `start`: exec of `edgeinfer serve MODEL` to the first streamed token,
warm and cold. `switch`: a catalogue of ten models asked in turn, each resumed. `worker`: what streaming
through a worker adds to a token. `crash`: `kill -9` of the application under twenty streaming clients.

Without llama-server that side is left out and the table says so. Writes Markdown tables to stdout and JSON to
bench-out/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_serve_models import crash_section, percentile, start_section, switch_section, worker_section
from common import ROOT, free_port, model_path, peer_program, write_figure

MODEL = model_path("smollm2")
PARALLEL = 8
CONTEXT = 8192
TOPICS = [
    "rivers",
    "bread",
    "clocks",
    "wool",
    "bridges",
    "owls",
    "glass",
    "maps",
    "tides",
    "salt",
    "bells",
    "ink",
]


def prompt(number: int) -> str:
    """Different from its neighbours after a shared beginning, as prompts of one application are."""
    topic = TOPICS[number % len(TOPICS)]
    return f"You are writing for an encyclopedia. Write entry {number}, about {topic}, in a few plain sentences."


# --- one client
# --------------------------------------------------------------------------------


class Sample:
    """One answered request. Seconds."""

    def __init__(self, ttft: float, total: float, tokens: int, gaps: list[float]) -> None:
        self.ttft = ttft
        self.total = total
        self.tokens = tokens
        self.gaps = gaps


class _Client(asyncio.Protocol):
    """Sends a request and stamps what comes back, until the other side closes. It shares the cores, so
    it does nothing else.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def ask(port: int, number: int, tokens: int, model: str) -> Sample:
    """One streamed chat completion over a connection of its own."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt(number)}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    request = f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    begun = time.perf_counter()
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: _Client(request), "127.0.0.1", port
    )
    await client.ended
    ended = time.perf_counter()
    stamps = [now for now, piece in client.pieces for _ in re.findall(rb'"content":"(?!")', piece)]
    used = re.search(
        rb'"completion_tokens":\s*(\d+)', b"".join(piece for _, piece in client.pieces[-4:])
    )
    if not used or not stamps:
        raise SystemExit(f"no answer: {client.pieces!r}")
    return Sample(
        stamps[0] - begun, ended - begun, int(used[1]), [b - a for a, b in itertools.pairwise(stamps)]
    )


async def closed_loop(
    one: Callable[[int], Any], width: int, requests: int, first: int
) -> tuple[list[Sample], float]:
    """`width` clients share `requests`; returns the samples and the wall seconds."""
    numbers = iter(range(first, first + requests))
    samples: list[Sample] = []

    async def client() -> None:
        for number in numbers:
            samples.append(await one(number))

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(width)))
    return samples, time.perf_counter() - begun


def figures(samples: list[Sample], wall: float) -> dict[str, float]:
    """tokens/s over the wall, and percentiles in milliseconds."""
    ttft = [s.ttft * 1000 for s in samples]
    gaps = [g * 1000 for s in samples for g in s.gaps] or [0.0]
    return {
        "tokens_per_s": sum(s.tokens for s in samples) / wall,
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p95_ms": percentile(gaps, 95),
    }


# --- the sides
# --------------------------------------------------------------------------------


@contextlib.contextmanager
def process(command: list[str], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_healthy(port: int, started: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert started.poll() is None, "the server ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as s:
            s.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            if s.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.005)
    raise SystemExit("the server did not become healthy")


CLI = [sys.executable, "-c", "import sys; from edgeinfer.cli import main; sys.exit(main())"]


def our_command(port: int, threads: int) -> list[str]:
    return [
        *CLI,
        "serve",
        str(MODEL),
        "--port",
        str(port),
        "--log",
        "off",
        "--parallel",
        str(PARALLEL),
        "--ctx",
        str(CONTEXT),
        "--threads",
        str(threads),
        "--max-queue",
        "256",
    ]


def their_command(server: str, port: int, threads: int) -> list[str]:
    return [
        server,
        "-m",
        str(MODEL),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-np",
        str(PARALLEL),
        "-c",
        str(CONTEXT),
        "-t",
        str(threads),
        "--no-webui",
    ]


class Server:
    """A running server of either side. It stays for the whole run: idle, it costs nothing to the other
    side.
    """

    def __init__(self, command: list[str], port: int, model: str, stack: contextlib.ExitStack) -> None:
        self.port, self.model = port, model
        started = stack.enter_context(process(command))
        wait_healthy(port, started)

    def measure(self, width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        asyncio.run(closed_loop(lambda n: ask(self.port, n, 4, self.model), min(width, 4), 4, 90_000))
        return figures(
            *asyncio.run(
                closed_loop(lambda n: ask(self.port, n, tokens, self.model), width, requests, first)
            )
        )


class BareEngine:
    """The engine without HTTP, driven by the same schedule in a process of its own."""

    def __init__(self, threads: int, stack: contextlib.ExitStack) -> None:
        command = [sys.executable, __file__, "--engine", str(threads)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        stack.enter_context(self._child)

    def measure(self, width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        if self._child.stdin is None or self._child.stdout is None:
            raise SystemExit("the engine's process has no pipes")
        print(f"{width},{requests},{tokens},{first}", file=self._child.stdin, flush=True)
        return dict(json.loads(self._child.stdout.readline()))


def engine_main(threads: int) -> None:
    """The child of `BareEngine`: a line in is a schedule, a line out its figures."""
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.events import Finished, Progress
    from edgeinfer.runtime.options import LoadOptions, ModelFiles
    from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

    options = LoadOptions(n_ctx=CONTEXT, n_parallel=PARALLEL, n_threads=threads)
    engine = load_engine(ModelFiles(name="m", paths=(str(MODEL),)), options, None)

    async def one(number: int, n_tokens: int) -> Sample:
        request = GenerateRequest(
            messages=(Message(role="user", content=prompt(number)),),
            sampling=Sampling(temperature=0),
            max_tokens=n_tokens,
            ignore_eos=True,
        )
        begun = time.perf_counter()
        stamps, made = [], 0
        async for event in engine.submit(request):
            if isinstance(event, Finished):
                made = event.usage.completion_tokens
            elif not isinstance(event, Progress):
                stamps.append(time.perf_counter())
        return Sample(
            stamps[0] - begun,
            time.perf_counter() - begun,
            made,
            [b - a for a, b in itertools.pairwise(stamps)],
        )

    async def main(width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        await closed_loop(lambda n: one(n, 4), min(width, 4), 4, 90_000)
        return figures(*await closed_loop(lambda n: one(n, tokens), width, requests, first))

    for line in sys.stdin:
        print(json.dumps(asyncio.run(main(*map(int, line.split(","))))), flush=True)
    engine.close()


# --- sections
# --------------------------------------------------------------------------------


def load_section(options: argparse.Namespace) -> list[dict[str, Any]]:
    theirs = peer_program("llama-server")
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        port, other = free_port(), free_port()
        sides: dict[str, Server | BareEngine] = {
            "edgeinfer": Server(our_command(port, options.threads), port, MODEL.stem, stack),
            "engine": BareEngine(options.threads, stack),
        }
        if theirs:
            sides["llama-server"] = Server(
                their_command(theirs, other, options.threads), other, "m", stack
            )
        for width in options.widths:
            rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(options.rounds):
                for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
                    got = sides[side].measure(
                        width, max(2 * width, 6), options.tokens, 1000 * (turn + 1) + 100 * width
                    )
                    rounds[side].append(got)
                    said = f"{got['tokens_per_s']:.1f} tokens/s, TTFT p50 {got['ttft_p50_ms']:.0f} ms"
                    print(f"  width {width} {side}: {said}", file=sys.stderr, flush=True)
            rows += [
                {"width": width, "side": side, "rounds": got} | medians(got)
                for side, got in rounds.items()
            ]
    return rows


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    keys = rounds[0]
    return {k: statistics.median(r[k] for r in rounds) for k in keys} | {
        "spread": {k: [min(r[k] for r in rounds), max(r[k] for r in rounds)] for k in keys}
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| clients | side | tokens/s | spread | TTFT p50 ms | TTFT p95 ms | between tokens p50 / p95 "
        "ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["spread"]["tokens_per_s"]
        lines.append(
            f"| {row['width']} | {row['side']} | {row['tokens_per_s']:.1f} | {low:.1f}–{high:.1f} | "
            f"{row['ttft_p50_ms']:.0f} "
            f"| {row['ttft_p95_ms']:.0f} | {row['itl_p50_ms']:.1f} / {row['itl_p95_ms']:.1f} |"
        )
    return "\n".join(lines)


def others(report: dict[str, Any]) -> str:
    """The sections beside the load, a row each; "" when none was measured."""
    lines = []
    for how, row in report.get("start", {}).items():
        lines.append(
            f"| exec → first streamed token, {how} | {row['median_ms']:.0f} ms median, "
            f"{row['p95_ms']:.0f} ms p95 |"
        )
    if row := report.get("switch"):
        lines.append(
            f"| ten names of the one file in turn, {row['resumed']} of {row['switches']} switches resumed | "
            f"resume {row['resume_p50_ms']:.0f} ms p50, {row['resume_p95_ms']:.0f} ms p95; "
            f"request → first token "
            f"{row['first_token_p50_ms']:.0f} ms p50, {row['first_token_p95_ms']:.0f} ms p95 "
            f"|"
        )
    if row := report.get("worker"):
        lines.append(
            f"| a token through a worker | {row['added_ms']:+.2f} ms ({row['worker_p50_ms']:.2f} beside "
            f"{row['own_p50_ms']:.2f} ms between tokens, p50) |"
        )
    if row := report.get("crash"):
        after = f"{row['next_answer_p50_ms']:.0f} ms p50, {row['worst_ms']:.0f} ms at worst"
        lines.append(
            f"| `kill -9` under 20 streaming clients, {row['kills']} times | {row['refused']} connections refused; "
            f"next first token after {after} |"
        )
    return "\n".join(["| | |", "|---|---|", *lines]) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--widths", type=lambda s: [int(w) for w in s.split(",")], default=[1, 4, 8, 16, 32]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sections", default="load,start,switch,worker,crash")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(options.engine)
        return
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    report: dict[str, Any] = {
        "model": MODEL.name,
        "parallel": PARALLEL,
        "context": CONTEXT,
        "tokens": options.tokens,
    }
    texts = []
    if "load" in options.sections:
        report["load"] = load_section(options)
        missing = (
            ""
            if peer_program("llama-server")
            else "\n\nllama-server is not here (tools/setup.sh bench fetches it): that side is missing."
        )
        texts.append(table(report["load"]) + missing)
    if "start" in options.sections:
        report["start"] = start_section(MODEL)
    if "switch" in options.sections:
        report["switch"] = switch_section(MODEL)
    if "worker" in options.sections:
        report["worker"] = worker_section(MODEL)
    if "crash" in options.sections:
        report["crash"] = crash_section(MODEL)
    texts.append(others(report))
    text = "\n\n".join(filter(None, texts)) + "\n"
    out = ROOT / "bench-out"
    name = f"serve-{options.sections.replace(',', '-')}"
    print(write_figure(out, name, text))
    (out / f"{name}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
