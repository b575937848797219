"""Measure the prefix cache, compared with llama-server in the same run: `make bench-memory`.

turns      N conversations of some 1,000 tokens continued in turn over HTTP: total time, first token, memory
restart    `kill -9` of the server, then the same conversation: exec to first token, recomputed tokens
edits      edit in the middle, regenerate, another model in between, unloaded: tokens computed beyond the new ones

Sides take turns; figures are medians. Each section uses its own homes, which are removed, and writes
bench-out/memory-SECTION.md and .json. With --keep FOLDER the homes stay there, so that a later
`restart` need not repeat the first prefill, which takes minutes with a large model. Without
llama-server, its side is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
from common import SHAPES, drop, make_parser, model_of, model_path, numbers, percentile, write_figure
from made_decoders import make_lfm2
from peer_server import Answer, Messages, Rows, Side, conversation, name_of, ours, theirs

from edgeinfer.bench import markdown

#: Layers of a model so narrow that reading a block takes longer than writing it.
_HYBRID_LAYERS = 128
#: Cells of the context of `restart`, for prompts of 8,000 tokens and answers.
_N_CTX = 8192 + 1024
#: Tokens of an answer by which a decode step is timed.
_STEPS = 8


def turns_section(options: argparse.Namespace, work: Path) -> Rows:
    """Continue N conversations in turn; every round adds a question to each."""
    rows = []
    for n in options.conversations:
        both = ours(work / f"turns{n}", options.model, 8192), theirs(options.model, 8192)
        runs_by_side: dict[str, Rows] = {side.name: [] for side in both if side}
        for number in range(options.repeats):
            for side in filter(None, both):
                side.start()
                first = 1000 * (n + 100 * number)
                run = _turns(side, range(first, first + n), options)
                runs_by_side[side.name].append(run)
                print(json.dumps({"n": n, "side": side.name} | run), file=sys.stderr)
                side.stop()
        for name, runs in runs_by_side.items():
            medians = {key: statistics.median(row[key] for row in runs) for key in runs[0]}
            totals = sorted(row["total_s"] for row in runs)
            rows.append({"n": n, "side": name, "totals_s": totals} | medians)
    return rows


def _turns(side: Side, numbers: range, options: argparse.Namespace) -> dict[str, float]:
    chats = [conversation(number, options.words) for number in numbers]
    firsts: list[list[float]] = []
    prompts = []
    began = time.perf_counter()
    for round_number in range(options.rounds):
        firsts.append([])
        for chat in chats:
            answer = side.ask(chat)
            firsts[-1].append(answer.first_s)
            prompts.append(int(answer.usage["prompt_tokens"]))
            chat += next_turn(answer.text, f"And then, part {round_number + 2}?")
    total_s = time.perf_counter() - began
    later = [s for seconds in firsts[1:] for s in seconds]
    return {
        "prompt_tokens": statistics.median(prompts),
        "total_s": total_s,
        "first_round_p50_s": statistics.median(firsts[0]),
        "later_p50_s": statistics.median(later),
        "later_p95_s": percentile(later, 95),
        "private_mb": side.private_mb(),
    }


def turns_table(rows: Rows) -> str:
    head = ["conversations, in turn", "", "prompt", "all rounds", "first token, round 1"]
    lines = []
    for r in rows:
        total = f"{r['total_s']:.1f} s ({r['totals_s'][0]:.1f}–{r['totals_s'][-1]:.1f})"
        times = (ms(r[key]) for key in ("first_round_p50_s", "later_p50_s", "later_p95_s"))
        tokens, private = f"{r['prompt_tokens']:.0f} tokens", f"{r['private_mb']:.0f} MB"
        lines.append([str(r["n"]), r["side"], tokens, total, *times, private])
    return markdown([*head, "later, p50", "later, p95", "private memory"], lines)


def restart_section(options: argparse.Namespace, work: Path) -> Rows:
    """Continue the same conversation after `kill -9`, with a hot page cache and, if it may be dropped,
    a cold one.
    """
    rows = []
    for shape in options.shapes:
        model = model_of(shape, options.model, work)
        home = work / f"restart-{shape}"
        peer = None if options.alone else theirs(model, _N_CTX, slots=1)
        sides = [side for side in (ours(home, model, _N_CTX), peer) if side]
        if options.brief:
            rows += [{"model": shape} | row for row in _next_turns(sides, home, options)]
            continue
        for side in sides:
            rows.append({"model": shape} | _restarts(side, home, model, options))
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.stop()
    return rows


def _next_turns(sides: list[Side], home: Path, options: argparse.Namespace) -> Rows:
    """Measure only the next turn after `kill -9`, the sides in turn. llama-server retains nothing, so
    only edgeinfer is asked before.
    """
    asked = conversation(7, options.long_words)
    row, text = _read_at_first(sides[0], asked, home)
    wait_written(home, int(row["prompt_tokens"]))
    asked += next_turn(text, "Why?")
    restarts: dict[str, list[tuple[float, float, int]]] = {side.name: [] for side in sides}
    for _ in range(options.runs):
        for side in sides:
            restarts[side.name].append(_restart(side, asked))
            side.kill()
            print(json.dumps([side.name, *restarts[side.name][-1]]), file=sys.stderr)
    row = {"prompt_tokens": row["prompt_tokens"], "prefill_s": None}
    return [row | {"side": name} | _summary(samples) for name, samples in restarts.items()]


def _restarts(side: Side, home: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    asked = conversation(7, options.long_words)
    row, text = _read_at_first(side, asked, home)
    following = asked + next_turn(text, "Why?")
    if side.name != "edgeinfer":
        return row | _summary([_restart(side, following)])
    wait_written(home, int(row["prompt_tokens"]))
    again = [_restart(side, asked) for _ in range(options.runs)]
    step_s = _decode_step(side, asked)
    hot = [_restart(side, following) for _ in range(options.runs)]
    cold = [_restart(side, following, lambda: drop(_files(home, model))) for _ in range(options.runs)]
    side.kill()
    files = _files(home, model)
    drop(files)
    began = time.perf_counter()
    for path in files[1:]:
        path.read_bytes()
    details = {
        "same_exec_to_first_s": statistics.median(r[0] for r in again),
        "same_computed_tokens": max(r[2] for r in again),
        "step_s": step_s,
        "cold_exec_to_first_s": statistics.median(r[0] for r in cold),
        "disk_read_s": time.perf_counter() - began,
        "blocks_mb": sum(path.stat().st_size for path in files if path.suffix == ".block") / 1e6,
    }
    return row | _summary(hot) | details


def _read_at_first(side: Side, asked: Messages, home: Path) -> tuple[dict[str, Any], str]:
    """Return how long (s) an uncached prompt took, and its answer; stored in a home that is kept for
    later runs.
    """
    note = home / f"{side.name}.json"
    if not note.exists():
        side.start()
        answer = side.ask(asked)
        n_tokens = answer.usage["prompt_tokens"]
        prefill_s = answer.first_s if answer.n_cached < n_tokens // 10 else None
        row = {"side": side.name, "prompt_tokens": n_tokens, "prefill_s": prefill_s}
        note.write_text(json.dumps([row, answer.text]))
    row, text = json.loads(note.read_text())
    return row, text


def _decode_step(side: Side, chat: Messages) -> float:
    """Return the seconds of a decode step after a conversation in memory."""
    one_s, more_s = (
        min(side.ask(chat, n=n, ignore_eos=True, speculative="off").total_s for _ in range(3))
        for n in (1, 1 + _STEPS)
    )
    return (more_s - one_s) / _STEPS


def _summary(restarts: list[tuple[float, float, int]]) -> dict[str, Any]:
    return {
        "exec_to_first_s": statistics.median(r[0] for r in restarts),
        "exec_to_first_min_s": min(r[0] for r in restarts),
        "exec_to_first_max_s": max(r[0] for r in restarts),
        "first_s": statistics.median(r[1] for r in restarts),
        "computed_tokens": max(r[2] for r in restarts),
    }


def _files(home: Path, model: Path) -> list[Path]:
    """List the model, and the files of a stopped server: snapshot and complete blocks."""
    written = [path for path in (home / "cache").rglob("*") if not path.name.startswith(".")]
    return [path for path in (model, *written) if path.is_file()]


def _restart(
    side: Side, chat: Messages, before: Callable[[], None] | None = None
) -> tuple[float, float, int]:
    """Return the seconds from exec to the first token and from the request to it, and computed tokens.

    The answer is one token, because a model with random weights may begin with one that has no text.
    """
    side.kill()
    if before:
        before()
    began = time.perf_counter()
    side.start()
    healthy = time.perf_counter() - began
    again = side.ask(chat, n=1)
    return healthy + again.total_s, again.total_s, again.n_computed


def restart_table(rows: Rows) -> str:
    def tokens(count: int | None) -> str:
        return "–" if count is None else f"{count} tokens"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "prompt": lambda r: tokens(r["prompt_tokens"]),
        "read at first in": lambda r: f"{r['prefill_s']:.1f} s" if r["prefill_s"] else "–",
        "next turn, exec → first token": lambda r: ms(r["exec_to_first_s"]),
        "worst": lambda r: ms(r["exec_to_first_max_s"]),
        "request → first token": lambda r: ms(r["first_s"]),
        "computed": lambda r: tokens(r["computed_tokens"]),
        "the same prompt again": lambda r: ms(r.get("same_exec_to_first_s")),
        "computed then": lambda r: tokens(r.get("same_computed_tokens")),
        "a decode step there": lambda r: ms(r.get("step_s")),
        "next turn, cold page cache": lambda r: ms(r.get("cold_exec_to_first_s")),
        "reading those files": lambda r: ms(r.get("disk_read_s")),
        "blocks": lambda r: f"{r['blocks_mb']:.0f} MB" if "blocks_mb" in r else "–",
    }
    lines = [[r["model"], r["side"], *(cell(r) for cell in columns.values())] for r in rows]
    return markdown(["after `kill -9`", "", *columns], lines)


def edits_section(options: argparse.Namespace, work: Path) -> Rows:
    """Count recomputed tokens after a conversation is edited, regenerated, left for another model, or
    its model is unloaded; with an attention model, one with a sliding window, and a hybrid of random
    weights.
    """
    rows = []
    attention, window = options.model, model_path("gemma3")
    hybrid = make_lfm2(work / "hybrid.gguf", attention, _HYBRID_LAYERS)
    for model, other in ((attention, window), (window, attention), (hybrid, attention)):
        side = ours(work / f"edits-{name_of(model)}", model, 4096, more_models=[other])
        side.start()
        for case, answer in _edits(side, name_of(other), options.words).items():
            counts = {
                "prompt_tokens": answer.usage["prompt_tokens"],
                "computed_tokens": answer.n_computed,
            }
            rows.append({"model": side.model, "case": case, **counts})
            print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def _edits(side: Side, other: str, n_words: int) -> dict[str, Answer]:
    chat = conversation(11, n_words)
    for turn in range(3):
        chat += next_turn(side.ask(chat).text, f"More {turn}?")
    cases = {"next turn": side.ask(chat)}
    cases["regenerate"] = side.ask(chat)
    cases["edit in the middle"] = side.ask([*chat[:2], {"role": "user", "content": "Something else?"}])
    cases["back to the first branch"] = side.ask(chat)
    dropped = next_turn(chat[-2]["content"][-20:], "And without the reasoning?")
    cases["reasoning dropped"] = side.ask([*chat[:-2], *dropped])
    side.ask(conversation(12, n_words), model=other)
    cases["after another model"] = side.ask(chat)
    side.unload(side.model)
    cases["after it left memory"] = side.ask(chat)
    side.stop()
    side.start()
    cases["after a restart"] = side.ask(chat)
    return cases


def edits_table(rows: Rows) -> str:
    keys = ("prompt_tokens", "computed_tokens")
    lines = [[r["case"], r["model"], *(f"{r[key]} tokens" for key in keys)] for r in rows]
    return markdown(["what happens", "model", "prompt", "computed"], lines)


def next_turn(answer: str, question: str) -> Messages:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"


def wait_written(home: Path, n_tokens: int) -> None:
    """Wait until the blocks of `n_tokens` are on disk and no file is being written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = list((home / "cache").rglob("*.block"))
        if len(files) >= n_tokens // 256 and not list((home / "cache").rglob("*.new")):
            return
        time.sleep(0.1)


Section = Callable[[argparse.Namespace, Path], Rows]
SECTIONS: dict[str, tuple[Section, Callable[[Rows], str]]] = {
    "turns": (turns_section, turns_table),
    "restart": (restart_section, restart_table),
    "edits": (edits_section, edits_table),
}


@contextlib.contextmanager
def work_folder(named: str, permanent: Path | None = None) -> Iterator[Path]:
    """Yield a folder for the homes, removed at the end; or `permanent`, which stays."""
    if permanent is not None:
        permanent.mkdir(parents=True, exist_ok=True)
        yield permanent
        return
    folder = Path(tempfile.mkdtemp(prefix="edgeinfer-memory-", dir=named or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--conversations", type=numbers, default=[4, 10, 40], help="N of `turns`")
    repeats = "rounds of `turns`, whose sides alternate"
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    parser.add_argument("--rounds", type=int, default=3)
    size = "words of a conversation (some 1,000 tokens)"
    parser.add_argument("--words", type=int, default=980, help=size)
    long_words = "tokens of the long prompts of `restart`"
    parser.add_argument("--long-words", type=int, default=7900, help=long_words)
    parser.add_argument("--runs", type=int, default=5)
    shapes = f"models of `restart`: small, {', '.join(SHAPES)}"
    parser.add_argument("--shapes", default="small", help=shapes)
    alone = "without llama-server, which prefills a 4B's 8,000 tokens three times: half an hour"
    parser.add_argument("--alone", action="store_true", help=alone)
    brief = "only the next turn of `restart`, with a hot page cache"
    parser.add_argument("--brief", action="store_true", help=brief)
    parser.add_argument("--model", type=Path, default=None, help="default: the small test model")
    parser.add_argument("--work", default="", help="folder in which the homes are made")
    parser.add_argument("--keep", type=Path, help="folder of homes that are kept")
    options = parser.parse_args()
    options.model = options.model or model_path("smollm2")
    options.shapes = options.shapes.split(",")
    with work_folder(options.work, options.keep) as work:
        for name in options.sections.split(","):
            section, table = SECTIONS[name]
            rows = section(options, work)
            print(write_figure(options.out, f"memory-{name}", table(rows)))
            (options.out / f"memory-{name}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
