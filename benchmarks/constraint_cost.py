"""What constrained output costs: a mask beside llama.cpp's own grammar sampler, and an engine's
tokens/s with and without.

    python benchmarks/constraint_cost.py [--rounds 5] [--tokens 128] MODEL.gguf ...

`masks` measures one step of each side on the same tokens of the same JSON, and what compiling and
preparing take. `output_cost` measures a whole engine: the same prompts, seeds and number of tokens,
plain and by a JSON schema, in turn. Tokens that the schema forces are computed several in a step; the
rate is given with them and, as the cost of a sampled token, without. Speculation is off on both sides.
Writes a Markdown table to stdout and JSON to bench-out/constraint-cost.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import head

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 4, "maxLength": 24},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "city": {"type": "string", "minLength": 4, "maxLength": 24},
                    "likes": {
                        "type": "array",
                        "items": {"enum": ["music", "books", "walks", "bread"]},
                        "minItems": 1,
                        "maxItems": 3,
                    },
                },
                "required": ["name", "age", "city", "likes"],
                "additionalProperties": False,
            },
            "minItems": 40,
        },
        "title": {"type": "string"},
    },
    "required": ["people", "title"],
    "additionalProperties": False,
}
#: The same in llama.cpp's notation.
GBNF = r"""
root ::= "{\"people\": [" person (", " person)* "], \"title\": " string "}"
person ::= "{\"name\": " text ", \"age\": " age ", \"city\": " text ", \"likes\": [" like (", " like)? (", " like)? "]}"
age ::= "0" | [1-9] [0-9]? | "1" [01] [0-9] | "120"
like ::= "\"music\"" | "\"books\"" | "\"walks\"" | "\"bread\""
text ::= "\"" char{4,24} "\""
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f] | "\\" ["\\/bfnrt]
"""
TEXT = (
    '{"people": [{"name": "Ann Müller", "age": 31, "city": "Trondheim", "likes": ["music", "bread"]}, '
    '{"name": "Bo Ek", "age": 7, "city": "Lund by the sea", "likes": ["walks"]}'
)
PROMPTS = (
    "Describe the people in a village, as JSON.",
    "List some invented people.",
    "Who lives in the old house?",
)


def _masks_of_llguidance(vocab: Any) -> dict[str, Any]:
    from edgeinfer.runtime.requests import JsonSchema
    from edgeinfer.runtime.sampling.grammar import Constraints

    constraints = Constraints()
    started = time.perf_counter()
    constraints.prepare(vocab)
    prepare_ms = (time.perf_counter() - started) * 1e3
    started = time.perf_counter()
    compiled = constraints.compile(JsonSchema(SCHEMA), vocab)
    compile_ms = (time.perf_counter() - started) * 1e3
    tokens = vocab.tokenize(TEXT)
    times: list[float] = []
    for _ in range(5):
        matcher = compiled.start()
        for token in tokens:
            logits = np.zeros(vocab.n_vocab, np.float32)
            started = time.perf_counter()
            matcher.mask_into(logits)
            taken = matcher.accept(token)
            times.append((time.perf_counter() - started) * 1e6)
            assert taken, (token, TEXT)
    return {"prepare_ms": prepare_ms, "compile_ms": compile_ms, "step_us": times}


def _masks_of_llama_cpp(vocab: Any) -> dict[str, Any]:
    from llama_cpp import llama_cpp as L

    started = time.perf_counter()
    grammar = L.llama_sampler_init_grammar(vocab.pointer, GBNF.encode(), b"root")
    compile_ms = (time.perf_counter() - started) * 1e3
    assert grammar
    kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    times: list[float] = []
    for token in vocab.tokenize(TEXT):
        candidates = np.zeros(vocab.n_vocab, kind)
        candidates["id"] = np.arange(vocab.n_vocab)
        pointer = candidates.ctypes.data_as(ctypes.POINTER(L.llama_token_data))
        array = L.llama_token_data_array(pointer, vocab.n_vocab, -1, False)
        started = time.perf_counter()
        L.llama_sampler_apply(grammar, ctypes.byref(array))
        assert candidates["logit"][token] == 0.0
        L.llama_sampler_accept(grammar, token)
        times.append((time.perf_counter() - started) * 1e6)
    L.llama_sampler_free(grammar)
    return {"prepare_ms": 0.0, "compile_ms": compile_ms, "step_us": times}


def masks(vocab: Any) -> dict[str, dict[str, float]]:
    """One step (mask and accept) of either side over the same tokens. Microseconds; compiling and
    preparing milliseconds.
    """
    sides = {"llguidance": _masks_of_llguidance(vocab), "llama.cpp": _masks_of_llama_cpp(vocab)}
    made = {}
    for name, side in sides.items():
        steps = sorted(side["step_us"])
        made[name] = {
            "prepare_ms": side["prepare_ms"],
            "compile_ms": side["compile_ms"],
            "median_us": statistics.median(steps),
            "p95_us": steps[int(len(steps) * 0.95)],
            "worst_us": steps[-1],
        }
    return made


def _run(engine: Any, prompt: str, seed: int, tokens: int, constraint: Any) -> dict[str, float]:
    from edgeinfer.runtime.events import Finished
    from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

    request = GenerateRequest(
        messages=(Message(role="user", content=prompt),),
        constraint=constraint,
        max_tokens=tokens,
        ignore_eos=constraint is None,
        speculative="off",
        sampling=Sampling(seed=seed),
    )
    (finished,) = [event for event in engine.submit(request) if isinstance(event, Finished)]
    made, timings = finished.usage.completion_tokens, finished.timings
    return {
        "tokens": made,
        "tokens_per_s": timings.decode_tokens_per_s(made),
        "constraint_us": timings.constraint_ms * 1e3 / max(made, 1),
    }


def output_cost(engine: Any, *, rounds: int = 5, tokens: int = 128) -> dict[str, float]:
    """Tokens/s of `engine`, plain and by a JSON schema, the same prompts in turn. `lost` is the share
    lost, below 0 a gain.

    `lost_sampled` leaves the gain of forced tokens out: it compares the time constraints take with the
    time of a plain token.
    """
    from edgeinfer.runtime.requests import JsonSchema

    constraint = JsonSchema(SCHEMA)
    for side in (None, constraint):
        _run(engine, PROMPTS[0], 0, 16, side)
    plain, bound = [], []
    for i in range(rounds):
        prompt = PROMPTS[i % len(PROMPTS)]
        plain.append(_run(engine, prompt, i, tokens, None))
        bound.append(_run(engine, prompt, i, tokens, constraint))
    rate = statistics.median(run["tokens_per_s"] for run in plain)
    bound_rate = statistics.median(run["tokens_per_s"] for run in bound)
    constraint_us = statistics.median(run["constraint_us"] for run in bound)
    return {
        "plain_tokens_per_s": rate,
        "plain_min": min(run["tokens_per_s"] for run in plain),
        "plain_max": max(run["tokens_per_s"] for run in plain),
        "schema_tokens_per_s": bound_rate,
        "schema_min": min(run["tokens_per_s"] for run in bound),
        "schema_max": max(run["tokens_per_s"] for run in bound),
        "constraint_us_per_token": constraint_us,
        "lost": 1 - bound_rate / rate,
        "lost_sampled": constraint_us / (1e6 / rate + constraint_us),
    }


def _measure(path: Path, rounds: int, tokens: int) -> dict[str, Any]:
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    engine = load_engine(
        ModelFiles(name=path.stem, paths=(str(path),)), LoadOptions(n_ctx=2048, n_parallel=1)
    )
    try:
        return {
            "masks": masks(engine._loaded.vocab),
            "output": output_cost(engine, rounds=rounds, tokens=tokens),
        }
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    results = {path.stem: _measure(path, args.rounds, args.tokens) for path in args.models}
    print(head() + "\n")
    print(
        "| model | side | prepare ms | compile ms | step µs: median | p95 | worst |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, result in results.items():
        for side, m in result["masks"].items():
            cells = [m["prepare_ms"], m["compile_ms"], m["median_us"], m["p95_us"], m["worst_us"]]
            print(f"| {name} | {side} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    print(
        "\n| model | plain tokens/s (min to max) | by schema (min to max) | lost | constraint µs a "
        "token | "
        "lost without forcing |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, result in results.items():
        o = result["output"]
        print(
            f"| {name} | {o['plain_tokens_per_s']:.1f} ({o['plain_min']:.1f} to {o['plain_max']:.1f}) "
            f"| "
            f"{o['schema_tokens_per_s']:.1f} ({o['schema_min']:.1f} to {o['schema_max']:.1f}) | "
            f"{o['lost']:.1%} | "
            f"{o['constraint_us_per_token']:.0f} | {o['lost_sampled']:.1%} |"
        )
    out = Path("bench-out")
    out.mkdir(exist_ok=True)
    (out / "constraint-cost.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
