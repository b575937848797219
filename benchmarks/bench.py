"""`make bench`: load time, prefill and decode rates of both real models, compared with a bare
llama_decode loop in the same process and with llama-bench if it is on PATH. Writes bench-out/bench.md
and bench-out/bench.json.

Sides alternate, round by round; figures are medians with the range of the rounds. The bare loop shows
llama.cpp's speed with its own defaults (micro-batches of 512) and greedy sampling by numpy, without our
Python.

`--decode` measures one stream instead, sides in turn: ours, llama-server and, with `--ik FOLDER`,
llama-bench of an ik_llama.cpp that was built there, on plain and on repacked weights. It also reports
the share of the rate at which a plain loop reads memory in the same run (bench-out/decode.md).
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path

import gguf
import numpy as np
from bench_matmul import peak  # type: ignore[import-not-found]  # its own imports are of the tests
from common import NAMES, describe, make_parser, model_path, peer_program, spread, summary, write_figure
from peer_server import Server

from edgeinfer.bench import markdown
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Sampling

PREFILL = 512
DECODE = 128
#: Tokens of an answer with `--decode`.
_DECODE_IN_TURN = 32
_SHORT_RUNS = 8  # runs of 12 tokens, which are compared with the plain loop
N_CTX = 2048
_TEXT = "The quick brown fox jumps over the lazy dog, and then it rests. "


class Bare:
    """A loop that only calls llama_decode, without edgeinfer."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self.llama = L = libllama.lib()
        self.model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
        params = L.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_batch = PREFILL
        params.n_ubatch = PREFILL
        params.n_threads = params.n_threads_batch = n_threads
        params.n_outputs_max = 8
        self.context = L.llama_init_from_model(self.model, params)
        self.memory = L.llama_get_memory(self.context)
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))

    def decode(self, tokens: list[int]) -> None:
        array = (self.llama.llama_token * len(tokens))(*tokens)
        batch = self.llama.llama_batch_get_one(array, len(tokens))
        assert self.llama.llama_decode(self.context, batch) == 0

    def greedy(self) -> int:
        pointer = self.llama.llama_get_logits_ith(self.context, -1)
        row = (ctypes.c_float * self.n_vocab).from_address(ctypes.addressof(pointer.contents))
        return int(np.frombuffer(row, np.float32).argmax())

    def rates(self, prompt: list[int], n: int = DECODE) -> tuple[float, float]:
        """Measure prefill of the prompt and decode of n tokens, in tokens/s."""
        self.llama.llama_memory_clear(self.memory, False)
        began = time.perf_counter()
        self.decode(prompt)
        prefill = len(prompt) / (time.perf_counter() - began)
        self.llama.llama_memory_clear(self.memory, False)
        self.decode(prompt[:16])
        token = self.greedy()
        began = time.perf_counter()
        for _ in range(n):
            self.decode([token])
            token = self.greedy()
        return prefill, n / (time.perf_counter() - began)

    def close(self) -> None:
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


def run_to_end(engine: LlamaEngine, prompt: list[int], n: int) -> Finished:
    request = GenerateRequest(
        prompt=tuple(prompt),
        max_tokens=n,
        sampling=Sampling(temperature=0),
        ignore_eos=True,
        cache_prompt=False,
        speculative="off",
    )
    last = list(engine.submit(request))[-1]
    assert isinstance(last, Finished)
    return last


def engine_rates(engine: LlamaEngine, prompt: list[int]) -> tuple[float, float]:
    """Measure prefill (prompt to first token) and steady decode in tokens/s, by the engine's timings."""
    prefill = run_to_end(engine, prompt, 1).timings.prefill_ms
    last_event = run_to_end(engine, prompt[:16], DECODE + 1)
    return 1000.0 * len(prompt) / prefill, last_event.timings.decode_tokens_per_s(DECODE + 1)


def beside(engine: LlamaEngine, bare: Bare, prompt: list[int], n: int = DECODE) -> tuple[float, float]:
    """Measure tokens/s (prefill, decode) of the bare loop, on the engine's own decode thread.

    libgomp creates a team of threads for every thread that calls ggml. With more threads than
    processors, all threads sleep at barriers instead of spinning, which makes both sides 30 % slower.
    """
    return engine.between_steps(lambda: bare.rates(prompt, n))


def time_call(work) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return (time.perf_counter() - began) * 1000.0, result


def measure(name: str, rounds: int) -> dict[str, object]:
    path = model_path(name)
    files = ModelFiles(name=name, paths=(str(path),))
    options = LoadOptions(n_ctx=N_CTX, n_parallel=1)
    rows: dict[str, list[float]] = {}
    engine: LlamaEngine | None = None
    bare: Bare | None = None
    for _ in range(rounds):
        for side in (engine, bare):
            if side is not None:
                side.close()
        ms, engine = time_call(lambda: load_engine(files, options))  # type: ignore[assignment]
        rows.setdefault("load_ms ours", []).append(ms)
        threads = engine.info.choices["n_threads"].value
        ms, bare = time_call(lambda n=threads: Bare(path, n))  # type: ignore[assignment]
        rows.setdefault("load_ms bare", []).append(ms)
    assert engine is not None
    assert bare is not None
    prompt = (engine.tokenize(_TEXT) * 64)[:PREFILL]
    engine_rates(engine, prompt)
    beside(engine, bare, prompt)
    for _ in range(rounds):
        for label, (prefill, decode) in (
            ("ours", engine_rates(engine, prompt)),
            ("bare", beside(engine, bare, prompt)),
        ):
            rows.setdefault(f"prefill_tok_s {label}", []).append(prefill)
            rows.setdefault(f"decode_tok_s {label}", []).append(decode)
    engine.close()
    bare.close()
    result: dict[str, object] = {key: summary(values) for key, values in rows.items()}
    result |= llama_bench(path, threads)
    return result


def llama_bench(path: Path, threads: int) -> dict[str, object]:
    tool = peer_program("llama-bench")
    if tool is None:
        return {}
    flags = f"-p {PREFILL} -n {DECODE} -t {threads} -r 3 -o json".split()
    done = subprocess.run([tool, "-m", path, *flags], check=True, capture_output=True, text=True)
    rates = {}
    for row in json.loads(done.stdout):
        key = "prefill_tok_s" if row["n_prompt"] else "decode_tok_s"
        rates[f"{key} llama-bench"] = summary(row["samples_ts"])
    return rates


def _read_by_a_token(path: Path) -> int:
    """Return the bytes of weights that one token needs: all except a separate table of embeddings."""
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    has_output = "output.weight" in tensors
    return sum(size for name, size in tensors.items() if name != "token_embd.weight" or not has_output)


def _ik_rate(folder: str, path: Path, threads: int, *, is_repacked: bool) -> float:
    program = next(file for file in Path(folder).rglob("llama-bench") if file.is_file())
    flags = f"-p 0 -n {_DECODE_IN_TURN} -t {threads} -r 1 -o json -rtr {int(is_repacked)}".split()
    done = subprocess.run([program, "-m", path, *flags], check=True, capture_output=True, text=True)
    (row,) = json.loads(done.stdout[done.stdout.index("[") :])
    return float(row["avg_ts"])


def measure_decode(name: str, rounds: int, ik: str) -> dict[str, list[float]]:
    """Return tokens/s of one stream by side and round.

    "read" is the rate (GB/s) at which a plain loop reads the mapped model, and "share" the part of that
    rate which our short runs reach. The host of a virtual machine may move its processors at any moment,
    which halves the rate. So a run counts only if the loop's rates before and after differ by < 10 %.
    """
    path = model_path(name)
    files = ModelFiles(name=name, paths=(str(path),))
    engine = load_engine(files, LoadOptions(n_ctx=N_CTX, n_parallel=1))
    threads = engine.info.choices["n_threads"].value
    prompt, level = engine.tokenize(_TEXT * 2)[:16], libllama.build_info().kernels

    def decode_rate(n: int = _DECODE_IN_TURN) -> float:
        return run_to_end(engine, prompt, n + 1).timings.decode_tokens_per_s(n + 1)

    def add_shares() -> None:
        before = peak(level, path)[3]
        for _ in range(_SHORT_RUNS):
            rate, after = decode_rate(12), peak(level, path)[3]
            if abs(after - before) < after / 10:
                rates["read"].append((before + after) / 2)
                rates["share"].append(_read_by_a_token(path) / 1e9 * rate / rates["read"][-1])
            before = after

    sides: dict[str, Callable[[], float]] = {"ours": decode_rate}
    server = None
    if program := peer_program("llama-server"):
        server = peer = Server(program, path, slots=1, n_ctx=N_CTX, threads=threads)

        def of_server() -> float:
            arrivals = peer.stream(prompt, _DECODE_IN_TURN + 1, cache=False)
            return _DECODE_IN_TURN / (arrivals[-1] - arrivals[0])

        sides["llama-server"] = of_server
    if ik:
        sides["ik"] = lambda: _ik_rate(ik, path, threads, is_repacked=False)
        sides["ik, repacked"] = lambda: _ik_rate(ik, path, threads, is_repacked=True)
    rates: dict[str, list[float]] = {side: [] for side in ("read", "share", *sides)}
    for number in range(rounds + 1):  # the first round is a warm-up
        for side, rate in sides.items():
            rates[side].append(rate())
        if not number:
            rates = {side: [] for side in rates}
        else:
            add_shares()
    engine.close()
    if server is not None:
        server.close()
    return rates


def decode_table(rates: dict[str, dict[str, list[float]]]) -> str:
    """Return the figure's rows: medians with the range of the rounds, in tokens/s; ratios within a round."""
    peers = [side for side in next(iter(rates.values())) if side not in ("read", "share", "ours")]
    rows = []
    for model, sides in rates.items():
        size = _read_by_a_token(model_path(model)) / 1e9
        cells = {side: spread(values, "", 1) for side, values in sides.items() if values}
        share = f"{statistics.median(sides['share']):.0%}" if sides["share"] else "–"
        ratios = {peer: statistics.median(map(truediv, sides["ours"], sides[peer])) for peer in peers}
        beside = [f"{cells[peer]}, {ratios[peer]:.2f} ×" for peer in peers]
        rows.append([model, f"{size:.2f}", cells.get("read", "–"), cells["ours"], share, *beside])
    head = ["model", "GB a token", "plain loop, GB/s", "ours", "share of the loop", *peers]
    return markdown(head, rows)


def table(results: dict[str, dict]) -> str:
    rows = []
    for model, measured in results.items():
        for figure, mark in (
            ("load_ms", "lower"),
            ("prefill_tok_s", "higher"),
            ("decode_tok_s", "higher"),
        ):
            sides = [measured.get(f"{figure} {side}") for side in ("ours", "bare", "llama-bench")]
            edgeinfer, bare, peer = (describe(side, "", 1) if side else "–" for side in sides)
            ratio = sides[0]["median"] / sides[1]["median"]
            rows.append([model, f"{figure} ({mark} is better)", edgeinfer, bare, f"{ratio:.3f}", peer])
    head = ["model", "figure", "ours", "bare llama_decode loop", "ours/bare", "llama-bench"]
    return markdown(head, rows)


def main() -> None:
    parser = make_parser(__doc__)
    models = "smollm2, gemma3, or a shape of random weights such as 4b-q4_k_m"
    parser.add_argument("--models", nargs="+", default=list(NAMES), metavar="NAME", help=models)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", action="store_true", help="measure only one stream, sides in turn")
    ik = "folder of a built ik_llama.cpp with llama-bench"
    parser.add_argument("--ik", default="", metavar="FOLDER", help=ik)
    options = parser.parse_args()
    if options.decode:
        rates = {name: measure_decode(name, options.rounds, options.ik) for name in options.models}
        print(write_figure(options.out, "decode", decode_table(rates)))
        return
    results = {name: measure(name, options.rounds) for name in options.models}
    print(write_figure(options.out, "bench", table(results)))
    (options.out / "bench.json").write_text(json.dumps({"models": results}, indent=1))


if __name__ == "__main__":
    main()
