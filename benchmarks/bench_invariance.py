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

from common import NAMES, ROOT, load_only, make_parser, model_path, write_figure

from edgeinfer.bench import markdown
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished, TextDelta
from edgeinfer.runtime.llama import libedgeinfer
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


def compute(engine: LlamaEngine, requests: list[GenerateRequest], at_once: int = _AT_ONCE) -> Outcome:
    """Compute the texts in groups."""
    outcome = Outcome()
    for first in range(0, len(requests), at_once):
        running = [engine.submit(request) for request in requests[first : first + at_once]]
        for generation in running:
            outcome.add(iter(generation))
    return outcome


def load(name: str) -> LlamaEngine:
    files = ModelFiles(name=name, paths=(str(model_path(name)),))
    return load_engine(files, LoadOptions(n_ctx=16384, n_parallel=_AT_ONCE))


def greedy(prompt: str, n_tokens: int, **fields: object) -> GenerateRequest:
    usual = {"sampling": Sampling(temperature=0), "ignore_eos": True}
    return GenerateRequest(prompt=prompt, max_tokens=n_tokens, **{**usual, **fields})


def texts_rows(name: str, n: int, n_tokens: int) -> list[list[str]]:
    """Return the rows of a model."""
    rows: list[list[str]] = []
    first: Outcome | None = None
    with tempfile.TemporaryDirectory() as folder:
        limits = CacheLimits(max_bytes=4 << 30, margin_bytes=0)
        ways = list(WAYS)
        for group in (ways[:-1], ways[-1:]):
            with closing(load(name)) as engine:
                engine.open_prefix_cache(BlockStore(Path(folder), limits))
                for way in group:
                    at_once, fields = WAYS[way]
                    fields = {"speculative": "off", **fields}
                    requests = [greedy(prompt, n_tokens, **fields) for prompt in prompts(n)]
                    outcome = compute(engine, requests, at_once)
                    first = first or outcome
                    same = sum(a == b for a, b in zip(first.texts, outcome.texts, strict=True))
                    used = map(str, (outcome.cached, outcome.from_disk, outcome.drafts))
                    rows.append([name, way, f"{same} of {n}", *used])
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
    load_only(variant)
    requests = {
        "greedy": [greedy(prompt, n_tokens, cache_prompt=False) for prompt in prompts(n)],
        "sampled": [sampled(prompt, n_tokens, seed) for seed, prompt in enumerate(prompts(n))],
    }
    with closing(load(name)) as engine:
        print(json.dumps({kind: compute(engine, group).texts for kind, group in requests.items()}))


def sampled(prompt: str, n_tokens: int, seed: int) -> GenerateRequest:
    """Return a request for a text with penalties and a schema."""
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 0.2, "dry_multiplier": 0.8}
    sampling = Sampling(temperature=0.8, seed=seed, **penalties)
    fields = {"constraint": JsonSchema(schema=_SCHEMA), "ignore_eos": False, "cache_prompt": False}
    return greedy(prompt, n_tokens, sampling=sampling, **fields)


def variants_rows(name: str, variants: list[str], n: int, n_tokens: int) -> list[list[str]]:
    """Return the rows of a model: texts of each variant that equal those of the first."""
    rows: list[list[str]] = []
    expected: dict[str, list[str]] = {}
    for variant in variants:
        command = [sys.executable, __file__, "--texts-of", variant, name, str(n), str(n_tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        texts: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
        expected = expected or texts
        same = (sum(map(operator.eq, expected[kind], texts[kind])) for kind in texts)
        rows.append([name, variant, *(f"{count} of {n}" for count in same)])
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


def perplexity_row(name: str, n_windows: int) -> list[str]:
    """Return the row of a model."""
    text = docs()
    step = len(text) // n_windows
    windows = [text[i * step : (i + 1) * step] for i in range(n_windows)]
    edgeinfer, llamas = (
        text_perplexity(model_path(name), windows, kernels) for kernels in ("ours", "llama.cpp")
    )
    return [name, f"{llamas:.4f}", f"{edgeinfer:.4f}", f"{edgeinfer / llamas - 1:+.3%}"]


def main() -> None:
    """Write OUT/invariance.md and OUT/perplexity.md."""
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--variants", help="CPU variants of ggml, separated by commas")
    parser.add_argument("--score", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--texts-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.score:
        score(*options.score)
        return
    if options.texts_of:
        variant, name, *numbers = options.texts_of
        texts_of(variant, name, *map(int, numbers))
        return
    models, sizes = options.models.split(","), (options.texts, options.tokens)

    def write(name: str, head: list[str], rows: list[list[str]]) -> None:
        print(write_figure(options.out, name, markdown(head, rows)))

    if options.variants:
        variants = options.variants.split(",")
        rows = [row for name in models for row in variants_rows(name, variants, *sizes)]
        write("variants", ["model", "variant", "equal greedy texts", "equal sampled texts"], rows)
        return
    if options.windows:
        rows = [perplexity_row(name, options.windows) for name in models]
        write("perplexity", ["model", "llama.cpp's kernels", "ours", "difference"], rows)
    if options.texts:
        rows = [row for name in models for row in texts_rows(name, *sizes)]
        head = ["model", "way", "equal texts", "cached tokens", "of them from disk", "accepted drafts"]
        write("invariance", head, rows)


if __name__ == "__main__":
    main()
