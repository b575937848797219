"""`make bench-adapters`: what LoRA adapters cost, alone and mixed in one batch.

Each mixture of streams is answered greedily at once, `--rounds` times in turn; figures are medians of tokens a
second of all streams together, and of their share of the model alone in the same round. The adapters are random, of
`--rank` on every matrix of every layer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from common import add_out, model_path, write_figure

from edgeinfer.models.gguf import read_header
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Sampling

NAMES = ("A", "B", "C", "D")
BASE: tuple[str, ...] = ()
#: What the streams of a mixture have.
MIXTURES = {
    "1 stream, the model alone": [BASE],
    "1 stream with A": [("A",)],
    "1 stream with A and B": [("A", "B")],
    "8 streams, the model alone": [BASE] * 8,
    "8 with A": [("A",)] * 8,
    "4 with A, 4 the model alone": [("A",), BASE] * 4,
    "2 with each of A to D": [(name,) for name in NAMES] * 2,
    "4 the model alone, 1 with each of A to D": [
        BASE,
        ("A",),
        BASE,
        ("B",),
        BASE,
        ("C",),
        BASE,
        ("D",),
    ],
}


def make_adapter(model: Path, path: Path, rank: int, seed: int, kind: str) -> None:
    """An adapter of small random numbers for every matrix of every layer of `model`."""
    rng = np.random.default_rng(seed)
    header = read_header(model)
    writer = gguf.GGUFWriter(path, header.text("general.architecture"))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in header.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            n_in, n_out = tensor.shape
            for end, shape in (("lora_a", (rank, n_in)), ("lora_b", (n_out, rank))):
                writer.add_tensor(f"{tensor.name}.{end}", rng.normal(0, 0.01, shape).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rate(engine: LlamaEngine, streams: list[tuple[str, ...]], n: int) -> float:
    """Tokens a second of all streams together, their short prompts included."""
    requests = [
        GenerateRequest(
            prompt=f"Note {i}:",
            sampling=Sampling(temperature=0),
            max_tokens=n,
            ignore_eos=True,
            speculative="off",
            cache_prompt=False,
            lora=tuple((name, 1.0) for name in names),
        )
        for i, names in enumerate(streams)
    ]
    began = time.monotonic()
    for generation in [engine.submit(request) for request in requests]:
        for _ in generation:
            pass
    return len(streams) * n / (time.monotonic() - began)


def main() -> None:
    """Write OUT/adapters.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    kinds = ["float32", "float16"]
    parser.add_argument("--types", nargs="+", choices=kinds, default=kinds, help="of A and B")
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=["smollm2", "4b-q4_k_m"],
        help="smollm2, gemma3, or shapes of random weights",
    )
    add_out(parser)
    options = parser.parse_args()
    rows = [
        "| model | adapters | streams | tokens/s | of the model alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in options.models:
        for kind in options.types:
            rows += _rows(f"{name} | {kind}", measure(model_path(name), kind, options))
    title = f"Adapters of rank {options.rank} on every matrix of every layer.\n\n"
    print(write_figure(options.out, "adapters", title + "\n".join(rows) + "\n"))


def measure(model: Path, kind: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Rates of each mixture, tokens a second of all its streams, a round each."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{name}.gguf") for name in NAMES]
        for seed, path in enumerate(paths):
            make_adapter(model, Path(path), options.rank, seed, kind)
        engine = load_engine(
            ModelFiles(name="base", paths=(str(model),)),
            LoadOptions(n_ctx=2048, n_parallel=8, lora=",".join(paths)),
        )
        found: dict[str, list[float]] = {name: [] for name in MIXTURES}
        try:
            for streams in MIXTURES.values():
                rate(engine, streams, 4)
            for _ in range(options.rounds):
                for name, streams in MIXTURES.items():
                    found[name].append(rate(engine, streams, options.tokens))
        finally:
            engine.close()
    return found


def _rows(case: str, found: dict[str, list[float]]) -> list[str]:
    rows = []
    for name, rates in found.items():
        middle = statistics.median(rates)
        spread = (max(rates) - min(rates)) / 2 / middle
        alone = "1 stream, the model alone" if name.startswith("1 ") else "8 streams, the model alone"
        share = statistics.median(a / b for a, b in zip(rates, found[alone], strict=True))
        rows.append(f"| {case} | {name} | {middle:.0f} ± {spread:.0%} | {share:.0%} |")
    return rows


if __name__ == "__main__":
    main()
