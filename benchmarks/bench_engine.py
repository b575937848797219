"""`make bench-engine`: gain and cost of continuous batching, prefix reuse and constraints, on both real
models in one run.

Peers are a bare llama_decode loop in the same process, our engine without draft tokens, and
llama-server with as many slots. Sides alternate, and so does which begins. Figures are medians of the
rounds with minimum and maximum; latencies are percentiles over all streams of all rounds. Takes six
minutes. Writes OUT/bench-engine.md and OUT/bench-engine.json.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import peer_server
from bench import Bare, beside, run_to_end
from common import NAMES, make_parser, model_path, peer_program, percentile, write_figure

from edgeinfer.bench import markdown
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished, Progress, TextDelta
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Message, Sampling

WIDTHS = (1, 2, 4, 8, 16, 32)
TOKENS = 32
N_CTX = 8192
WORDS = (
    "rivers bread clocks whales ink bridges tea salt wool maps snow glass paper iron wine corn".split()
)
GREEDY = Sampling(temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 12},
    },
    "required": ["name", "age", "tags"],
}


def request(tokens: list[int], n: int, **fields) -> GenerateRequest:
    usual = {"sampling": GREEDY, "ignore_eos": True, "cache_prompt": False}
    return GenerateRequest(prompt=tuple(tokens), max_tokens=n, **usual | fields)


class Ours:
    """Our engine, with the same interface as the peer."""

    def __init__(self, engine: LlamaEngine, speculative: str = "auto") -> None:
        self.engine, self._speculative = engine, speculative

    def stream(self, prompt: list[int], n: int, *, cache: bool) -> list[float]:
        """Return the arrival times of the tokens at the consumer. A text of several tokens counts as
        one arrival for each.
        """
        # logprobs would separate tokens but cost time; the greedy prompts here give text for nearly
        # every token
        arrivals: list[float] = []
        generate_request = request(prompt, n, cache_prompt=cache, speculative=self._speculative)
        for event in self.engine.submit(generate_request):
            if isinstance(event, TextDelta):
                arrivals.append(time.perf_counter())
            elif isinstance(event, Finished):
                textless = max(0, event.usage.completion_tokens - len(arrivals))
                arrivals += [time.perf_counter()] * textless
        return arrivals


def together(side, prompts: list[list[int]], n: int, *, cache: bool) -> dict:
    """Run all prompts at the same time: tokens/s from the first submission to the last token, and each
    stream's latencies.
    """
    arrivals: list[list[float]] = [[] for _ in prompts]
    ready = threading.Barrier(len(prompts) + 1)

    def one(i: int) -> None:
        ready.wait()
        arrivals[i] = side.stream(prompts[i], n, cache=cache)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    wall = max(a[-1] for a in arrivals) - began
    return {
        "tok_s": sum(map(len, arrivals)) / wall,
        "ttft_ms": [(a[0] - began) * 1000 for a in arrivals],
        "gap_ms": [(b - a) * 1000 for times in arrivals for a, b in itertools.pairwise(times)],
    }


def merge(samples: list[dict]) -> dict:
    ttft = [v for s in samples for v in s["ttft_ms"]]
    gaps = [v for s in samples for v in s["gap_ms"]]
    rates = [s["tok_s"] for s in samples]
    return {
        "tok_s": statistics.median(rates),
        "tok_s_min": min(rates),
        "tok_s_max": max(rates),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p95_ms": percentile(gaps, 95),
    }


def prompts_of(engine: LlamaEngine, width: int, salt: int) -> list[list[int]]:
    pairs = [f"{WORDS[i % 16]} and {WORDS[i % 16 - 3]}" for i in range(width)]
    return [
        engine.tokenize(f"{salt}. Write note {i} about {pair}, with care:")
        for i, pair in enumerate(pairs)
    ]


def single(engine: LlamaEngine, path: Path, rounds: int) -> dict:
    """Measure the steady decode rate of one stream against the bare loop: short rounds in turn, and the
    median of their ratios.
    """
    bare = Bare(path, engine.info.choices["n_threads"].value)
    prompt = engine.tokenize("The quick brown fox jumps over the lazy dog, and then")
    engine_rates, bare_rates = [], []
    for _ in range(4 * rounds + 1):
        engine_rates.append(run_to_end(engine, prompt, 33).timings.decode_tokens_per_s(33))
        bare_rates.append(beside(engine, bare, prompt, 32)[1])
    bare.close()
    engine_rates, bare_rates = engine_rates[1:], bare_rates[1:]
    return {
        "ours_tok_s": statistics.median(engine_rates),
        "bare_tok_s": statistics.median(bare_rates),
        "ours_best_tok_s": max(engine_rates),
        "bare_best_tok_s": max(bare_rates),
        "ratio": statistics.median(a / b for a, b in zip(engine_rates, bare_rates, strict=True)),
    }


@contextlib.contextmanager
def peer(engine: LlamaEngine, path: Path, slots: int) -> Iterator[dict[str, peer_server.Server]]:
    """Run llama-server with `slots` until the block ends; yield no side without the program."""
    program, threads = peer_program("llama-server"), engine.info.choices["n_threads"].value
    if program is None:
        yield {}
        return
    server = peer_server.Server(program, path, slots=slots, n_ctx=N_CTX, threads=threads)
    with contextlib.closing(server):
        yield {"llama_server": server}


def widths(engine: LlamaEngine, path: Path, rounds: int) -> dict:
    figures = {}
    for width in WIDTHS:
        with peer(engine, path, width) as peers:
            sides = {"ours": Ours(engine), "off": Ours(engine, "off")} | peers
            samples: dict[str, list[dict]] = {name: [] for name in sides}
            for side in sides.values():
                together(side, prompts_of(engine, width, rounds), 4, cache=False)
            for r in range(rounds):
                for name in list(sides) if r % 2 else reversed(sides):
                    prompts = prompts_of(engine, width, r)
                    samples[name].append(together(sides[name], prompts, TOKENS, cache=False))
        figures[width] = {name: merge(s) for name, s in samples.items()}
        print(width, {name: round(v["tok_s"], 1) for name, v in figures[width].items()}, flush=True)
    return figures


def shared_prefix(engine: LlamaEngine, path: Path, rounds: int) -> dict:
    """Measure 8 concurrent streams that share a 500-token prefix, with a new prefix each round."""
    with peer(engine, path, 8) as peers:
        sides = {"ours": Ours(engine)} | peers
        samples: dict[str, list[dict]] = {name: [] for name in sides}
        for r in range(rounds):
            rule = f"Rule {r} of {WORDS[r]}: be brief and kind, and say only what you know. "
            prefix = engine.tokenize(rule * 60)[:500]
            prompts = [prefix + engine.tokenize(f" Now write about {WORDS[i]}:") for i in range(8)]
            for name, side in sides.items():
                samples[name].append(together(side, prompts, TOKENS, cache=True))
    return {name: merge(s) for name, s in samples.items()}


def stall(engine: LlamaEngine) -> dict:
    """Measure the longest gap of a running stream while a 2,000-token prompt is prefilled."""
    prompt = engine.tokenize("The quick brown fox jumps over the lazy dog, and then")
    long = (engine.tokenize("Nobody has counted the waves of the sea. ") * 300)[:2000]
    times: list[float] = []
    chunks: list[tuple[float, int]] = []

    def read_long(generation) -> None:
        for event in generation:
            if isinstance(event, Progress) and not event.queued:
                chunks.append((time.perf_counter(), event.done_tokens))

    other = None
    for event in engine.submit(request(prompt, 400, speculative="off")):
        if isinstance(event, TextDelta):
            times.append(time.perf_counter())
            if len(times) == 40:
                generation = engine.submit(request(long, 1, speculative="off"))
                other = threading.Thread(target=read_long, args=(generation,))
                other.start()
    assert other is not None
    other.join()
    gaps = [(b - a) * 1000 for a, b in itertools.pairwise(times)]
    sizes = [b[1] - a[1] for a, b in itertools.pairwise(chunks)]
    took = [(b[0] - a[0]) * 1000 for a, b in itertools.pairwise(chunks)]
    normal = statistics.median(gaps[:38])
    return {
        "normal_step_ms": normal,
        "longest_gap_ms": max(gaps[38:]),
        "p95_gap_ms": percentile(gaps[38:], 95),
        "chunk_tokens_median": statistics.median(sizes) if sizes else 0,
        "chunk_ms_max": max(took, default=0.0),
        "bound_ms": 3 * normal + max(took, default=0.0),
    }


def conversation(engine: LlamaEngine) -> list[float]:
    """Return the share of each turn's prompt that came from the cache."""
    turns = [Message(role="system", content="You answer in a few plain sentences. " * 12)]
    shares = []
    for i in range(10):
        turns.append(Message(role="user", content=f"And what about {WORDS[i]}?"))
        text = ""
        turn = GenerateRequest(messages=tuple(turns), sampling=GREEDY, max_tokens=100)
        for event in engine.submit(turn):
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Finished):
                shares.append(event.usage.cached_tokens / event.usage.prompt_tokens)
        turns.append(Message(role="assistant", content=text))
    return shares


def schema_cost(engine: LlamaEngine, rounds: int) -> dict:
    """Compare decode rates with and without a JSON schema: same prompts, one stream."""
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    share = []
    for r in range(rounds + 1):
        for name, constraint in (("free", None), ("schema", JsonSchema(SCHEMA))):
            prompt = f"{r}. A JSON record of a person called {WORDS[r].title()}, with many tags: "
            fields = {"constraint": constraint, "ignore_eos": constraint is None, "speculative": "off"}
            last = list(engine.submit(request(engine.tokenize(prompt), 97, **fields)))[-1]
            assert isinstance(last, Finished)
            if r:
                rates[name].append(last.timings.decode_tokens_per_s(last.usage.completion_tokens))
                if constraint:
                    share.append(last.timings.constraint_ms / max(1.0, last.timings.decode_ms))
    free, schema = statistics.median(rates["free"]), statistics.median(rates["schema"])
    return {
        "free_tok_s": free,
        "schema_tok_s": schema,
        "ratio": schema / free,
        "constraint_share": statistics.median(share),
    }


def measure(name: str, rounds: int, sections: set[str]) -> dict:
    path = model_path(name)
    options = LoadOptions(n_ctx=min(N_CTX, 4096), n_parallel=max(WIDTHS))
    engine = load_engine(ModelFiles(name=name, paths=(str(path),)), options)
    engine.warm_up()
    before = engine.metrics()
    work = {
        "single": lambda: single(engine, path, rounds),
        "widths": lambda: widths(engine, path, rounds),
        "shared_prefix": lambda: shared_prefix(engine, path, max(2, rounds - 2)),
        "stall": lambda: stall(engine),
        "conversation": lambda: conversation(engine),
        "schema": lambda: schema_cost(engine, rounds),
    }
    figures: dict[str, object] = {}
    for key in [k for k in work if k in sections]:
        figures[key] = work[key]()
        print(name, key, json.dumps(figures[key], default=str)[:600], flush=True)
    after = engine.metrics()
    python, decode, prefill = (
        getattr(after, f"{part}_seconds_total") - getattr(before, f"{part}_seconds_total")
        for part in ("python", "decode", "prefill")
    )
    figures["python_share"] = python / max(1e-9, decode + prefill)
    engine.close()
    return figures


def table(results: dict[str, dict]) -> str:
    rows = [[model, *row] for model, figures in results.items() for row in _rows(figures)]
    return markdown(["model", "figure", "ours", "beside", "ratio"], rows)


def _rows(figures: dict) -> Iterator[list[str]]:
    """Yield the rows of a model in the figure."""
    if s := figures.get("single"):
        rates = (f"{s['ours_tok_s']:.1f} tok/s", f"bare loop {s['bare_tok_s']:.1f} tok/s")
        yield ["single stream", *rates, f"{s['ratio']:.3f}"]
    for width, sides in figures.get("widths", {}).items():
        yield [f"{width} streams", *_against(sides)]
    if sides := figures.get("shared_prefix"):
        yield ["8 streams, 500 shared tokens", *_against(sides)]
    if s := figures.get("stall"):
        gap, bound = s["longest_gap_ms"], s["bound_ms"]
        cells = (
            f"longest gap {gap:.0f} ms",
            f"bound {bound:.0f} ms (step {s['normal_step_ms']:.1f} ms)",
        )
        yield ["stall beside a 2,000-token prompt", *cells, f"{gap / bound:.2f}"]
    if shares := figures.get("conversation"):
        cells = (f"lowest {min(shares[1:]):.3f}", f"turn 1 {shares[0]:.3f}")
        yield ["cached share of turns 2 to 10", *cells, ""]
    if s := figures.get("schema"):
        rates = (f"{s['schema_tok_s']:.1f} tok/s", f"free {s['free_tok_s']:.1f} tok/s")
        yield ["JSON schema", *rates, f"{s['ratio']:.3f}"]
    yield ["Python beside llama.cpp", f"{figures['python_share']:.3f} of its time", "", ""]


def _against(sides: dict) -> tuple[str, str, str]:
    def words(s: dict) -> str:
        latency = f"TTFT {s['ttft_p50_ms']:.0f}/{s['ttft_p95_ms']:.0f}, gap {s['gap_p50_ms']:.0f}/{s['gap_p95_ms']:.0f} ms"
        return f"{s['tok_s']:.1f} tok/s ({s['tok_s_min']:.1f}–{s['tok_s_max']:.1f}; {latency})"

    default, off, peer = (sides.get(name) for name in ("ours", "off", "llama_server"))
    beside = f"llama-server {words(peer)}" if peer else "no llama-server"
    ratio = f"{default['tok_s'] / peer['tok_s']:.2f}" if peer else ""
    drafts = f"; {default['tok_s'] / off['tok_s']:.2f} of itself without drafts" if off else ""
    return words(default), beside, f"{ratio}{drafts}"


def main() -> None:
    all_sections = ["single", "widths", "shared_prefix", "stall", "conversation", "schema"]
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--sections", nargs="+", default=all_sections, choices=all_sections)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = {name: measure(name, options.rounds, set(options.sections)) for name in options.models}
    print(write_figure(options.out, "bench-engine", table(results)))
    (options.out / "bench-engine.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
