"""`make bench-invariance`: greedy texts are the same in any batch, and perplexity is llama.cpp's.

Texts continue pieces of this repository's docs. Each way of computing them is compared with the first,
unbatched way, text by text. Perplexity is that of the same docs, in windows, with the in-tree kernels
and with llama.cpp's own (not repacked). `--variants haswell,zen4` compares texts, greedy and sampled
with penalties and a schema, between CPU variants instead.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from common import NAMES, ROOT, add_out, model_path, write_figure

from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished, TextDelta
from edgeinfer.runtime.llama import libedgeinfer, libllama
from edgeinfer.runtime.llama.helpers import perplexity
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Sampling

_AT_ONCE = 32
_WINDOW_TOKENS = 2048
#: A way of computing the texts → number of concurrent requests, and fields of each request.
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {"cache_prompt": False}),
    "beside 31 others": (_AT_ONCE, {"cache_prompt": False}),
    "beside 31 others, with drafts": (_AT_ONCE, {"cache_prompt": False, "speculative": "ngram"}),
    "the same, kept in the prefix cache": (_AT_ONCE, {}),
    "from the prefix cache in memory": (_AT_ONCE, {}),
    "after a restart, from the prefix cache on disk": (_AT_ONCE, {}),
}


def docs() -> str:
    """Return the pages of this repository, without generated tables."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    lines = "\n".join(page.read_text() for page in pages).splitlines()
    return "\n".join(line for line in lines if not line.startswith("|"))


def prompts(n: int) -> list[str]:
    """Return pieces of the docs, of 30 to 140 words."""
    docs_words = docs().split()
    step = len(docs_words) // n
    return [" ".join(docs_words[i * step : i * step + 30 + i * 37 % 111]) for i in range(n)]


class Outcome:
    """The texts of one way, with their cached tokens and drafts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.cached = self.from_disk = self.drafts = 0

    def add(self, events: Iterator[object]) -> None:
        text = ""
        for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Finished):
                self.cached += event.usage.cached_tokens
                self.from_disk += event.usage.cached_disk_tokens
                self.drafts += event.timings.draft_accepted_tokens
        self.texts.append(text)


def compute(engine: LlamaEngine, way: str, all_prompts: list[str], n_tokens: int) -> Outcome:
    """Compute the texts in groups."""
    at_once, fields = WAYS[way]
    outcome = Outcome()
    for first in range(0, len(all_prompts), at_once):
        running = [
            engine.submit(
                GenerateRequest(
                    prompt=prompt,
                    sampling=Sampling(temperature=0),
                    max_tokens=n_tokens,
                    ignore_eos=True,
                    **{"speculative": "off", **fields},  # type: ignore[arg-type]
                )
            )
            for prompt in all_prompts[first : first + at_once]
        ]
        for generation in running:
            outcome.add(iter(generation))
    return outcome


def texts_table(name: str, n: int, n_tokens: int) -> list[str]:
    """Return the rows of a model."""
    files = ModelFiles(name=name, paths=(str(model_path(name)),))
    options = LoadOptions(n_ctx=16384, n_parallel=_AT_ONCE)
    texts = prompts(n)
    rows: list[str] = []
    first: Outcome | None = None
    with tempfile.TemporaryDirectory() as folder:
        limits = CacheLimits(max_bytes=4 << 30, margin_bytes=0)
        ways = list(WAYS)
        for group in (ways[:-1], ways[-1:]):
            with closing(load_engine(files, options)) as engine:
                engine.open_prefix_cache(BlockStore(Path(folder), limits))
                for way in group:
                    outcome = compute(engine, way, texts, n_tokens)
                    first = first or outcome
                    same = sum(a == b for a, b in zip(first.texts, outcome.texts, strict=True))
                    used = f"{outcome.cached} | {outcome.from_disk} | {outcome.drafts}"
                    rows.append(f"| {name} | {way} | {same} of {n} | {used} |")
                    print(rows[-1], file=sys.stderr)
                engine.flush_blocks()
    return rows


#: Schema of the sampled texts of `--variants`.
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "words": {"type": "array", "items": {"type": "string"}, "minItems": 8},
    },
    "required": ["title", "year", "words"],
}


def texts_of(variant: str, name: str, n: int, n_tokens: int) -> None:
    """Print greedy texts and as many sampled ones, computed in this process with one of ggml's CPU variants."""
    with tempfile.TemporaryDirectory() as folder:
        for found in libllama.variant_dirs():
            for library in found.glob(f"libggml-cpu-{variant}.so"):
                (Path(folder) / library.name).symlink_to(library)
        libllama.variant_dirs = lambda: [Path(folder)]
        files = ModelFiles(name=name, paths=(str(model_path(name)),))
        with closing(load_engine(files, LoadOptions(n_ctx=16384, n_parallel=_AT_ONCE))) as engine:
            outcomes = {}
            for kind in ("greedy", "sampled"):
                outcome = Outcome()
                for first in range(0, n, _AT_ONCE):
                    running = [
                        engine.submit(variant_request(kind, prompt, seed, n_tokens))
                        for seed, prompt in enumerate(prompts(n)[first : first + _AT_ONCE], first)
                    ]
                    for generation in running:
                        outcome.add(iter(generation))
                outcomes[kind] = outcome.texts
    print(json.dumps(outcomes))


def variant_request(kind: str, prompt: str, seed: int, n_tokens: int) -> GenerateRequest:
    """Return a request for a greedy text, or for a sampled one with penalties and a schema."""
    if kind == "greedy":
        sampling, constraint = Sampling(temperature=0), None
    else:
        sampling = Sampling(
            temperature=0.8, seed=seed, repeat_penalty=1.1, presence_penalty=0.2, dry_multiplier=0.8
        )
        constraint = JsonSchema(schema=_SCHEMA)
    return GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        constraint=constraint,
        max_tokens=n_tokens,
        ignore_eos=constraint is None,
        cache_prompt=False,
    )


def variants_table(name: str, variants: list[str], n: int, n_tokens: int) -> list[str]:
    """Return the rows of a model: texts of each variant that equal those of the first."""
    rows: list[str] = []
    expected: dict[str, list[str]] = {}
    for variant in variants:
        command = [sys.executable, __file__, "--texts-of", variant, name, str(n), str(n_tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        texts: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
        expected = expected or texts
        same = (sum(map(operator.eq, expected[kind], texts[kind])) for kind in texts)
        rows.append(f"| {name} | {variant} | " + " | ".join(f"{count} of {n}" for count in same) + " |")
        print(rows[-1], file=sys.stderr)
    return rows


def score(model: str, text: str, tokens: str, kernels: str) -> None:
    """Print the perplexity of a text, measured in this process."""
    if kernels == "llama.cpp":
        libedgeinfer.level_of = lambda variant: ""
    defaults = L.llama_model_default_params

    def plain() -> object:
        params = defaults()
        params.use_extra_bufts = False  # like the engine, do not repack weights
        return params

    L.llama_model_default_params = plain
    print(json.dumps(perplexity.measure([model, text, tokens])))


def text_perplexity(model: Path, windows: list[str], kernels: str) -> float:
    """Return the perplexity of all windows together."""
    total, n_tokens = 0.0, 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for window in windows:
            file.seek(0)
            file.truncate()
            file.write(window)
            file.flush()
            command = [sys.executable, __file__, "--score", str(model), file.name]
            done = subprocess.run(
                [*command, str(_WINDOW_TOKENS), kernels], check=True, stdout=subprocess.PIPE, text=True
            )
            score = json.loads(done.stdout.splitlines()[-1])
            total += math.log(score["perplexity"]) * score["n_tokens"]
            n_tokens += score["n_tokens"]
    return math.exp(total / n_tokens)


def perplexity_rows(name: str, n_windows: int) -> list[str]:
    """Return the row of a model."""
    text = docs()
    step = len(text) // n_windows
    windows = [text[i * step : (i + 1) * step] for i in range(n_windows)]
    edgeinfer, llamas = (
        text_perplexity(model_path(name), windows, kernels) for kernels in ("ours", "llama.cpp")
    )
    return [f"| {name} | {llamas:.4f} | {edgeinfer:.4f} | {edgeinfer / llamas - 1:+.3%} |"]


def main() -> None:
    """Write OUT/invariance.md and OUT/perplexity.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--variants", help="CPU variants of ggml, separated by commas")
    parser.add_argument("--score", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--texts-of", nargs=4, help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args()
    if options.score:
        score(*options.score)
        return
    if options.texts_of:
        variant, name, *numbers = options.texts_of
        texts_of(variant, name, *map(int, numbers))
        return
    models = options.models.split(",")
    if options.variants:
        rows = [
            "| model | variant | equal greedy texts | equal sampled texts |",
            "| --- | --- | --- | --- |",
        ]
        for name in models:
            rows += variants_table(name, options.variants.split(","), options.texts, options.tokens)
        print(write_figure(options.out, "variants", "\n".join(rows) + "\n"))
        return
    if options.windows:
        rows = ["| model | llama.cpp's kernels | ours | difference |", "| --- | --- | --- | --- |"]
        rows += [row for name in models for row in perplexity_rows(name, options.windows)]
        print(write_figure(options.out, "perplexity", "\n".join(rows) + "\n"))
    if options.texts:
        head = "| model | way | equal texts | cached tokens | of them from disk | accepted drafts |"
        rows = [head, "| --- | --- | --- | --- | --- | --- |"]
        rows += [row for name in models for row in texts_table(name, options.texts, options.tokens)]
        print(write_figure(options.out, "invariance", "\n".join(rows) + "\n"))


if __name__ == "__main__":
    main()
