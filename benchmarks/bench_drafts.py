"""`make bench-drafts`: what draft tokens gain on code, chat and summaries, and that `auto` drafts only where that gains.

Each task is answered greedily, one stream, by every way of guessing in turn, `--rounds` times; figures are medians
of tokens a second, with the share of drafts that were accepted. Beside the tests' two models stands the
small one in F32, five times the bytes, with its own Q4_0 for a draft: a large model and a small one that agrees
with it mostly.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import ROOT, add_out, model_path, write_figure

from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing.helpers import QuantizeOptions, run_quantizer
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Sampling

CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def size(self):
        return len(self.items)
"""
TASKS = {
    "code, an edit": f"The file:\n\n{CODE}\nThe same file with the class renamed to Pile:\n\nclass Pile:\n",
    "chat": "Question: What should one see in Lisbon in two days, and why?\n\nAnswer:",
    "summary": (ROOT / "edgeinfer/data/perplexity.txt").read_text()[:2400]
    + "\n\nIn short, the text says that",
}


def ask(engine: LlamaEngine, prompt: str, how: str, n: int) -> tuple[float, int, int]:
    """Return the rate (tokens/s), draft tokens, and accepted draft tokens of one answer."""
    request = GenerateRequest(
        prompt=prompt, sampling=Sampling(temperature=0), max_tokens=n, ignore_eos=True, speculative=how
    )
    last = list(engine.submit(request))[-1]
    assert isinstance(last, Finished)
    timings = last.timings
    rate = timings.decode_tokens_per_s(last.usage.completion_tokens)
    return rate, timings.draft_tokens, timings.draft_accepted_tokens


def measure(files: ModelFiles, ways: tuple[str, ...], rounds: int, n: int) -> list[str]:
    """A row for each task."""
    engine = load_engine(files, LoadOptions(n_ctx=2048, n_parallel=1))
    rows = []
    try:
        for task, prompt in TASKS.items():
            ask(engine, prompt, "off", 2)
            found: dict[str, list[tuple[float, int, int]]] = {way: [] for way in ways}
            for number in range(rounds):
                first = number % len(ways)
                for way in (*ways[first:], *ways[:first]):
                    found[way].append(ask(engine, prompt, way, n))
            cells = [_cell(found[way]) for way in ways] + ["–"] * (4 - len(ways))
            rows.append(f"| {files.name} | {task} | {' | '.join(cells)} |")
    finally:
        engine.close()
    return rows


def _cell(found: list[tuple[float, int, int]]) -> str:
    rates = [rate for rate, _, _ in found]
    guessed = sum(one for _, one, _ in found)
    share = f", {sum(one for _, _, one in found) / guessed:.0%} of drafts" if guessed else ""
    spread = (max(rates) - min(rates)) / 2 / statistics.median(rates)
    return f"{statistics.median(rates):.0f} ± {spread:.0%}{share}"


def main() -> None:
    """Write OUT/drafts.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    add_out(parser)
    options = parser.parse_args()
    small = model_path("smollm2")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for kind in ("F32", "Q4_0"):
            made[kind] = Path(folder) / f"{kind}.gguf"
            number = file_type(kind)
            assert number is not None
            run_quantizer(small, made[kind], number, Job(), QuantizeOptions())
        plain = ("off", "auto", "ngram")
        for name, path in (("SmolLM2 135M Q4_1", small), ("Gemma 3 270M Q4_K_M", model_path("gemma3"))):
            rows += measure(
                ModelFiles(name=name, paths=(str(path),)), plain, options.rounds, options.tokens
            )
        drafted = ModelFiles(
            name="SmolLM2 135M F32",
            paths=(str(made["F32"]),),
            draft="Q4_0",
            draft_paths=(str(made["Q4_0"]),),
        )
        rows += measure(drafted, (*plain, "draft"), options.rounds, options.tokens)
    head = "| model | task | off | auto | n-gram | its Q4_0 drafts |"
    table = "\n".join([head, "| --- | --- | --- | --- | --- | --- |", *rows]) + "\n"
    print(write_figure(options.out, "drafts", table))


if __name__ == "__main__":
    main()
