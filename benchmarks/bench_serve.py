"""The endpoint under load, compared with llama-server in the same run and with itself without draft
tokens.

    python benchmarks/bench_serve.py [--models smollm2,gemma3] [--widths 1,2,4,8,16,32] [--rounds 4]
    [--tokens 48] [--bare]

Closed-loop clients stream chat completions of a fixed length over a real socket. Sides alternate;
figures are medians and spread over the rounds. The ratio is the median of the rounds' ratios, because
the machine's speed drifts by 5 % and more between rounds. `--bare` adds our engine without HTTP, in its
own process with the same schedule, which shows the cost of HTTP. All sides stay loaded, and sleep while
another is measured. All have our libgomp spin count (docs/decisions/002-spin-count.md), unless
GOMP_SPINCOUNT is set.

Without llama-server, its side is left out, and the table says so. Takes ten minutes. Writes
OUT/serve.md and JSON next to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    NAMES,
    LineProcess,
    free_port,
    make_parser,
    model_path,
    numbers,
    peer_command,
    peer_program,
    percentile,
    process,
    wait_healthy,
    write_figure,
)

from edgeinfer.bench import Answer, Target, markdown
from edgeinfer.bench import ask as stream

PARALLEL = 32
CONTEXT = 8192
TOPICS = "rivers bread clocks wool bridges owls glass maps tides salt bells ink".split()


def prompt(number: int) -> str:
    """Make a prompt that differs from its neighbours after a shared prefix, as prompts of one
    application do.

    There are 1,728 sets of topics, so that few answers repeat a past one, from which they would be
    drafted.
    """
    first, second, third = (TOPICS[number // len(TOPICS) ** k % len(TOPICS)] for k in range(3))
    entry = f"Write entry {number}, about {first}, {second} and {third}, in a few plain sentences."
    return f"You are writing for an encyclopedia. {entry}"


# --- one client


async def ask(target: Target, number: int, tokens: int, **fields: Any) -> Answer:
    """Stream one chat completion over a new connection."""
    messages = [{"role": "user", "content": prompt(number)}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    return await stream(target, "/v1/chat/completions", body)


async def closed_loop(
    send: Callable[[int], Any], width: int, requests: int, first: int
) -> tuple[list[Answer], float]:
    """Let `width` clients share `requests`; return the samples and the wall time (s)."""
    numbers = iter(range(first, first + requests))
    samples: list[Answer] = []

    async def client() -> None:
        for number in numbers:
            samples.append(await send(number))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(width)))
    return samples, time.perf_counter() - began


def figures(samples: list[Answer], wall: float) -> dict[str, float]:
    """Return tokens/s by the wall time, and percentiles in milliseconds."""
    ttft = [s.ttft_s * 1000 for s in samples]
    gaps = [g * 1000 for s in samples for g in s.gaps_s] or [0.0]
    return {
        "tokens_per_s": sum(s.completion_tokens for s in samples) / wall,
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p95_ms": percentile(gaps, 95),
    }


# --- the sides


CLI = [sys.executable, "-c", "import sys; from edgeinfer.cli.main import main; sys.exit(main())"]


def our_command(model: Path, port: int, threads: int) -> list[str]:
    shape = f"--parallel {PARALLEL} --ctx {CONTEXT} --threads {threads}"
    return [*CLI, "serve", str(model), "--port", str(port), "--log", "off", *shape.split()]


class Server:
    """A running server, which gets `fields` with each request. It stays for the whole run, because it
    costs nothing while idle.
    """

    def __init__(self, port: int, model: str, **fields: Any) -> None:
        self.target = Target(url=f"http://127.0.0.1:{port}", model=model)
        self.fields = fields

    def measure(self, width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        def ask_for(n_tokens: int) -> Callable[[int], Any]:
            return lambda n: ask(self.target, n, n_tokens, **self.fields)

        asyncio.run(closed_loop(ask_for(4), min(width, 4), 4, 90_000))
        return figures(*asyncio.run(closed_loop(ask_for(tokens), width, requests, first)))


class BareEngine(LineProcess):
    """The engine without HTTP, driven by the same schedule in a separate process."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(__file__, "--engine", str(threads), "--models", name)

    def measure(self, width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        return dict(json.loads(self.ask(f"{width},{requests},{tokens},{first}")))


def engine_main(model: Path, threads: int) -> None:
    """Run the child of `BareEngine`: each input line is a schedule, each output line its figures."""
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.events import Finished, Progress
    from edgeinfer.runtime.options import LoadOptions, ModelFiles
    from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

    options = LoadOptions(n_ctx=CONTEXT, n_parallel=PARALLEL, n_threads=threads)
    engine = load_engine(ModelFiles(name="m", paths=(str(model),)), options, None)

    async def one(number: int, n_tokens: int) -> Answer:
        request = GenerateRequest(
            messages=(Message(role="user", content=prompt(number)),),
            sampling=Sampling(temperature=0),
            max_tokens=n_tokens,
            ignore_eos=True,
        )
        start_s = time.perf_counter()
        stamps, n_generated = [], 0
        async for event in engine.submit(request):
            if isinstance(event, Finished):
                n_generated = event.usage.completion_tokens
            elif not isinstance(event, Progress):
                stamps.append(time.perf_counter())
        return Answer(
            arrivals=tuple(stamp - start_s for stamp in stamps),
            total_s=time.perf_counter() - start_s,
            prompt_tokens=0,
            cached_tokens=None,
            completion_tokens=n_generated,
        )

    async def main(width: int, requests: int, tokens: int, first: int) -> dict[str, float]:
        await closed_loop(lambda n: one(n, 4), min(width, 4), 4, 90_000)
        return figures(*await closed_loop(lambda n: one(n, tokens), width, requests, first))

    for line in sys.stdin:
        print(json.dumps(asyncio.run(main(*map(int, line.split(","))))), flush=True)
    engine.close()


# --- sections


def load_section(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one model at every width; a row for each side."""
    llama_server, model = peer_program("llama-server"), model_path(name)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:

        def start(command: list[str], port: int) -> None:
            wait_healthy(port, stack.enter_context(process(command)))

        port, other = free_port(), free_port()
        start(our_command(model, port, options.threads), port)
        sides: dict[str, Server | BareEngine] = {
            "edgeinfer": Server(port, model.stem),
            "without drafts": Server(port, model.stem, speculative="off"),
        }
        if options.bare:
            sides["engine"] = stack.enter_context(contextlib.closing(BareEngine(name, options.threads)))
        if llama_server:
            shape = {"slots": PARALLEL, "n_ctx": CONTEXT, "threads": options.threads}
            start(peer_command(llama_server, model, other, **shape), other)
            sides["llama-server"] = Server(other, "m")
        for width in options.widths:
            rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(options.rounds):
                for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
                    # prompts that no other side had: two sides may be one server
                    first = 100_000 * (turn + 1) + 10_000 * list(sides).index(side) + 100 * width
                    got = sides[side].measure(width, max(width, 4), options.tokens, first)
                    rounds[side].append(got)
                    said = f"{got['tokens_per_s']:.1f} tokens/s, TTFT p50 {got['ttft_p50_ms']:.0f} ms"
                    print(f"  {name}, width {width}, {side}: {said}", file=sys.stderr, flush=True)
            rows += [
                {"model": name, "width": width, "side": side, "rounds": got} | medians(got)
                for side, got in rounds.items()
            ]
    return rows


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    keys = rounds[0]
    return {k: statistics.median(r[k] for r in rounds) for k in keys} | {
        "spread": {k: [min(r[k] for r in rounds), max(r[k] for r in rounds)] for k in keys}
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        low, high = row["spread"]["tokens_per_s"]
        if row["side"] == "edgeinfer":
            own_rounds = row["rounds"]
        ratio = statistics.median(
            a["tokens_per_s"] / b["tokens_per_s"]
            for a, b in zip(own_rounds, row["rounds"], strict=True)
        )
        rates = (f"{row['tokens_per_s']:.1f}", f"{low:.1f}–{high:.1f}", f"{ratio:.2f}")
        first = (f"{row[f'ttft_p{p}_ms']:.0f}" for p in (50, 95))
        between = f"{row['itl_p50_ms']:.1f} / {row['itl_p95_ms']:.1f}"
        lines.append([row["model"], str(row["width"]), row["side"], *rates, *first, between])
    head = ["model", "clients", "side", "tokens/s", "spread", "edgeinfer to it", "TTFT p50 ms"]
    return markdown([*head, "TTFT p95 ms", "between tokens p50 / p95 ms"], lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=lambda s: s.split(","), default=list(NAMES))
    parser.add_argument("--widths", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--figure", default="serve", help="name of the table")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(model_path(options.models[0]), options.engine)
        return
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    rows = [row for name in options.models for row in load_section(name, options)]
    missing = (
        ""
        if peer_program("llama-server")
        else "\n\nllama-server is not here (scripts/setup.sh bench fetches it): that side is missing."
    )
    print(write_figure(options.out, options.figure, table(rows) + missing + "\n"))
    (options.out / f"{options.figure}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
