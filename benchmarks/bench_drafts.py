"""`make bench-drafts`: what draft tokens gain on edits, tool calls, JSON, chat and summaries, and
whether `auto` drafts only where that gains.

Every request is answered without drafts and with `auto` in turn, greedily, each time into an empty KV
cache. Figures are medians of tokens/s over `--rounds`, with the share of accepted drafts and of equal
texts. Tool calls and JSON are answered under a schema, after other requests of the same kind: `auto`
drafts from the stored answers to these. Measured answers are not stored.

`--draft-models 4B:Q2_K` drafts with a model. A large model gives SmolLM2's answers and costs as much as
a 4B or a 0.3B (its feed-forward is widened by rows that add zero), or is SmolLM2 itself (135M); the
small one is SmolLM2 in Q4_1 or in Q2_K, or one that is wrong (half of its weights are zeros).

The 4B shape has random weights, and so no sensible answers. Its rows are computed: from the steps that
`auto` takes for the real models' answers, and the measured times of such steps with the shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import random_gguf
from common import ROOT, make_parser, model_path, write_figure

from edgeinfer.bench import markdown
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished, TextDelta
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Sampling
from edgeinfer.runtime.sampling.past_answers import CONTEXT_TOKENS, PastAnswers
from edgeinfer.runtime.sampling.speculative import DraftBudget, Drafting, StepCurve, SuffixDrafter

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
TEXT = (ROOT / "edgeinfer/data/perplexity.txt").read_text()
NAMES = ("Pile", "Heap", "Shelf", "Tray", "Basket", "Drawer", "Crate", "Chest")
CITIES = ("Lisbon", "Oslo", "Kyoto", "Lima", "Cairo", "Turin", "Quito", "Perth")
PATHS = ("stack", "queue", "parser", "loader", "server", "client", "reader", "writer")
CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["read_file", "edit_file", "run_tests"]},
        "arguments": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 60},
                "reason": {"type": "string", "maxLength": 160},
            },
            "required": ["path", "reason"],
            "additionalProperties": False,
        },
    },
    "required": ["tool", "arguments"],
    "additionalProperties": False,
}
PERSON = {"name": {"type": "string"}, "city": {"type": "string"}, "years": {"type": "integer"}}
RECORDS = {
    "type": "array",
    "minItems": 8,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": PERSON,
        "required": list(PERSON),
        "additionalProperties": False,
    },
}


def _table(i: int) -> str:
    return "\n".join(f"{name}, {CITIES[(i + k) % 8]}, {20 + i + 3 * k}" for k, name in enumerate(NAMES))


def prompts(task: str) -> tuple[list[str], JsonSchema | None]:
    """Return eight requests of one kind, and their schema."""
    if task == "edit":
        instruction = "The same file with the class renamed to"
        return [f"The file:\n\n{CODE}\n{instruction} {n}:\n\nclass {n}:\n" for n in NAMES], None
    if task == "tool call":
        said = (
            'The tools are read_file, edit_file and run_tests, called as {"tool": …, "arguments": …}.'
        )
        asked = "Find out why the tests of /srv/project/src/{}.py fail.\n\nThe first call, as JSON:\n"
        return [f"{said}\n\n{asked.format(path)}" for path in PATHS], JsonSchema(CALL)
    if task == "JSON":
        asked = "As a JSON array of objects with name, city and years:\n"
        return [f"name, city, years\n{_table(i)}\n\n{asked}" for i in range(8)], JsonSchema(RECORDS)
    if task == "code":
        asked = '# Python\n\ndef is_in_{0}(word: str) -> bool:\n    """Return whether `word` is in {0}."""\n'
        return [asked.format(path) for path in PATHS], None
    if task == "chat":
        asked = "What should one see in {} in two days, and why?"
        return [f"Question: {asked.format(city)}\n\nAnswer:" for city in CITIES], None
    return [f"{TEXT[700 * i :][:2000]}\n\nIn short, the text says that" for i in range(8)], None


TASKS = ("edit", "tool call", "JSON", "chat", "summary")
#: Number of a task's eight requests that are answered before the measured ones.
_BEFORE = 6


def requests(task: str, n_tokens: int) -> list[GenerateRequest]:
    texts, schema = prompts(task)
    return [
        GenerateRequest(
            prompt=prompt,
            sampling=Sampling(temperature=0),
            max_tokens=n_tokens,
            ignore_eos=schema is None,
            constraint=schema,
        )
        for prompt in texts
    ]


def ask(
    engine: LlamaEngine, requests: list[GenerateRequest], speculative: str
) -> tuple[float, int, int, list[str]]:
    """Return the rate (tokens/s) of all streams together, draft tokens, accepted ones, and the texts."""
    # otherwise old cells would decide the order of the new ones
    engine.between_steps(engine._core.kv.drop_idle)
    running = [
        engine.submit(msgspec.structs.replace(r, speculative=speculative, cache_on_disk=False))
        for r in requests
    ]
    answers = [list(stream) for stream in running]
    finished = [event for events in answers for event in events if isinstance(event, Finished)]
    rate = sum(e.timings.decode_tokens_per_s(e.usage.completion_tokens) for e in finished)
    drafted = sum(e.timings.draft_tokens for e in finished)
    accepted = sum(e.timings.draft_accepted_tokens for e in finished)
    texts = ["".join(e.text for e in events if isinstance(e, TextDelta)) for events in answers]
    return rate, drafted, accepted, texts


def measure(
    engine: LlamaEngine,
    name: str,
    n_streams: int,
    rounds: int,
    n_tokens: int,
    tasks: tuple[str, ...] = TASKS,
) -> tuple[list[list[str]], dict[str, list[tuple[str, str]]]]:
    """Return a row for each task, and the measured prompts with their answers."""
    rows, said = [], {}
    for task in tasks if n_streams <= 8 else ("chat", "summary"):
        asked = requests(task, n_tokens)
        measured = asked[_BEFORE:] if n_streams == 1 else [asked[i % 8] for i in range(n_streams)]
        groups = [[r] for r in measured] if n_streams == 1 else [measured]
        for group in groups[:1]:
            ask(engine, group, "off")
        n_equal = n_texts = 0
        figures_by_mode: dict[str, list[tuple[float, int, int]]] = {"off": [], "auto": []}
        for number in range(rounds):
            for group in groups:
                texts = {}
                for mode in ("off", "auto") if number % 2 else ("auto", "off"):
                    *figures, texts[mode] = ask(engine, group, mode)
                    figures_by_mode[mode].append(tuple(figures))  # type: ignore[arg-type]
                n_texts += len(group)
                n_equal += sum(a == b for a, b in zip(texts["off"], texts["auto"], strict=True))
                said.setdefault(task, [])
                said[task] += zip((str(r.prompt) for r in group), texts["off"], strict=True)
        pairs = zip(*figures_by_mode.values(), strict=True)
        gain = f"{statistics.median(auto[0] / off[0] for off, auto in pairs):.2f}"
        cells = (*_cells(figures_by_mode), gain, f"{n_equal} of {n_texts}")
        rows.append([name, str(n_streams), task, *cells])
        print(rows[-1], flush=True)
    return rows, said


def _cells(figures_by_mode: dict[str, list[tuple[float, int, int]]]) -> list[str]:
    cells = []
    for figures in figures_by_mode.values():
        rates, drafted, accepted = zip(*figures, strict=True)
        middle = statistics.median(rates)
        cells.append(f"{middle:.0f} ± {(max(rates) - min(rates)) / 2 / middle:.0%}")
    return [*cells, _share(sum(accepted), sum(drafted))]  # the numbers of the last mode, `auto`


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.0%} of {drafted}" if drafted else "none"


def prime(engine: LlamaEngine, n_tokens: int) -> None:
    """Answer the requests before the measured ones: tool calls and JSON, as an agent has them."""
    for task in ("tool call", "JSON"):
        for request in requests(task, n_tokens)[:_BEFORE]:
            list(engine.submit(request))
    engine.flush_blocks()


def replay(
    engine: LlamaEngine,
    said: dict[str, list[tuple[str, str]]],
    curve: StepCurve,
    name: str,
    *,
    uses_past: bool,
) -> list[list[str]]:
    """Return a row for each task: the same answers, with the step times of another model's `curve`.

    If `uses_past`, tool calls and JSON are also drafted from past answers.
    """
    rows = []
    one_s = curve.seconds(1, 1)
    assert one_s is not None
    with tempfile.TemporaryDirectory() as folder:
        past = PastAnswers(Path(folder), b"secret")
        tasks = ("tool call", "JSON")
        for task in TASKS if uses_past else tasks:
            spent_s = 0.0
            n_tokens = drafted = accepted = 0
            for prompt, text in dict(said[task]).items():
                tokens, answer = engine.tokenize(prompt), engine.tokenize(text)
                drafter = SuffixDrafter(engine.info.n_vocab)
                drafter.answers = past.of("") if uses_past and task in tasks else None
                drafting, n_prompt = Drafting(drafter), len(tokens)
                while (done := len(tokens) - n_prompt) < len(answer):
                    drafts = drafting.propose(tokens, len(answer) - done - 1, DraftBudget(curve, 1, 1))
                    right = 0
                    while right < len(drafts) and drafts[right] == answer[done + right]:
                        right += 1
                    sampled = answer[done : done + right + 1]
                    tokens += sampled
                    drafting.record(sampled, n_drafted=len(drafts), n_accepted=right)
                    spent_s += curve.seconds(1, 1 + len(drafts)) or 0.0
                n_tokens += len(answer)
                drafted, accepted = drafted + drafting.drafted, accepted + drafting.accepted
                past.add("", "", tokens[n_prompt - CONTEXT_TOKENS :])
            rate = n_tokens / spent_s
            rates = (f"{1 / one_s:.1f}", f"{rate:.1f}", _share(accepted, drafted))
            cells = [*rates, f"{rate * one_s:.2f}", "–"]
            streams = "1, replayed" if uses_past else "1, replayed without past answers"
            rows.append([name, streams, task, *cells])
            print(rows[-1], flush=True)
        past.close()
    return rows


#: Large model → the width of its feed-forward, to which SmolLM2's is widened (0: it is not). A token
#: then reads 2.4 GB of weights, as with a 4B in Q4_K_M, or 0.3 GB.
WIDTHS = {"4B": 73_728, "0.3B": 8192, "135M": 0}
DRAFTS = ("Q4_1", "Q2_K", "wrong")
DRAFT_TASKS = ("chat", "code", "JSON", "edit")


def widened(name: str, folder: Path) -> Path:
    """Return the large model `name`, made in `folder` if it is missing."""
    small, width = model_path("smollm2"), WIDTHS[name]
    large = folder / f"smollm2-{width}.gguf"
    if width and not large.exists():
        random_gguf.widen(small, large, width)
    return large if width else small


def drafting_model(name: str, folder: Path) -> Path:
    """Return the draft model `name`, made in `folder` if it is missing."""
    small, draft = model_path("smollm2"), folder / f"smollm2-{name.lower()}.gguf"
    if name == "Q4_1":
        return small
    if name == "wrong" and not draft.exists():
        weights = small.read_bytes()
        draft.write_bytes(weights[: len(weights) // 2].ljust(len(weights), b"\0"))
    if name == "Q2_K" and not draft.exists():
        job = {"source": str(small), "target": str(draft), "ftype": 10}
        quantizer = [sys.executable, "-m", "edgeinfer.runtime.llama.helpers.quantizer"]
        subprocess.run([*quantizer, json.dumps(job)], check=True, stdout=subprocess.DEVNULL)
    return draft


def measure_draft_models(options: argparse.Namespace) -> list[list[str]]:
    """Return a row for each pair of models, number of streams and task, without past answers."""
    folder, rows = ROOT / "bench-out/models", []
    folder.mkdir(parents=True, exist_ok=True)
    for pair in options.draft_models:
        large, draft = pair.split(":")
        path, draft_path = widened(large, folder), drafting_model(draft, folder)
        files = files_of("large", path, draft=draft, draft_paths=(str(draft_path),))
        label = f"SmolLM2 of {path.stat().st_size / 1e9:.1f} GB, drafts of {draft}"
        for n_streams in map(int, options.streams.split(",")):
            engine = load_engine(files, LoadOptions(n_ctx=4096, n_parallel=n_streams, draft=draft))
            engine.warm_up()
            tasks = tuple(options.tasks)
            rows += measure(engine, label, n_streams, options.rounds, options.tokens, tasks)[0]
            engine.close()
    return rows


def files_of(name: str, path: Path, **draft: Any) -> ModelFiles:
    return ModelFiles(name=name, paths=(str(path),), **draft)


def curve_of(path: Path) -> StepCurve:
    """Measure the steps of a model."""
    with closing(load_engine(files_of("4b", path), LoadOptions(n_ctx=1024, n_parallel=1))) as engine:
        engine.warm_up()
        return engine._core.executor.step_costs


def main() -> None:
    """Write OUT/drafts.md."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--models", default="smollm2,gemma3")
    parser.add_argument("--shape", default="4b-q4_k_m", help="shape of random weights; empty: none")
    pairs: dict[str, Any] = {
        "choices": [f"{large}:{draft}" for large in WIDTHS for draft in DRAFTS],
        "default": [],
    }
    parser.add_argument("--draft-models", nargs="+", help="also measure draft models", **pairs)
    parser.add_argument("--tasks", nargs="+", default=DRAFT_TASKS, help="of draft models")
    options = parser.parse_args()
    rows = measure_draft_models(options)
    curve = curve_of(model_path(options.shape)) if options.shape else None
    for model in filter(None, options.models.split(",")):
        name = {"smollm2": "SmolLM2 135M Q4_1", "gemma3": "Gemma 3 270M Q4_K_M"}[model]
        said: dict[str, list[tuple[str, str]]] = {}
        for n_streams in map(int, options.streams.split(",")):
            n_ctx = 8192  # no eviction: cells out of order would change the sums
            options_of_load = LoadOptions(n_ctx=n_ctx, n_parallel=n_streams)
            engine = load_engine(files_of(name, model_path(model)), options_of_load)
            with tempfile.TemporaryDirectory() as folder:
                engine.warm_up()
                engine.open_prefix_cache(BlockStore(Path(folder) / "blocks"))
                prime(engine, options.tokens)
                sizes = (n_streams, options.rounds, options.tokens)
                measured_rows, answers = measure(engine, name, *sizes)
                rows += measured_rows
                said = said or answers
                if curve is not None and n_streams == 1:
                    for uses_past in (True, False):
                        label = f"{options.shape}, answers of {name}"
                        rows += replay(engine, said, curve, label, uses_past=uses_past)
                engine.close()
    head = ["model", "streams", "task", "off, tokens/s", "auto, tokens/s", "accepted", "auto to off"]
    print(write_figure(options.out, "drafts", markdown([*head, "equal texts"], rows)))


if __name__ == "__main__":
    main()
