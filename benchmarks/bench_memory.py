"""What is read once and remembered, beside llama-server in the same run: `make bench-memory`.

turns      N conversations of some 1,000 tokens asked in turn over HTTP: total time, first token, memory
restart    `kill -9` of the server, then the same conversation: exec to first token, tokens computed again
edits      edit in the middle, regenerate, another model in between, unloaded: tokens computed beyond the new ones
newcomer   short chats while a long prompt of somebody else is read
cost       decode rate with writing on and off; a neighbour's longest gap while a long prefix is restored

Sides take turns; medians. Each section runs in homes of its own below --work, which are removed.
Without llama-server that side is left out. Writes bench-out/memory.md and memory.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_serve_models import percentile
from common import ROOT, drop, model_path, write_figure
from memory_sides import Answer, Messages, Side, conversation, name_of, ours, theirs, wait_written

HERE = Path(__file__).parent
#: Shapes of models with random weights: the words for `random_gguf.py`.
SHAPES = {
    "4b": "--layers 36 --width 2560 --feed-forward 9728 --key-value-heads 8 --head-size 128"
    " --context 16384".split(),
    "7b": "--context 16384".split(),
}

# --- sections


def turns_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """N conversations in turn; every round adds a question to each."""
    rows = []
    for n in options.conversations:
        sides = [ours(work / f"turns{n}", options.model, 8192), theirs(options.model, 8192)]
        for side in [one for one in sides if one]:
            side.start()
            chats = [conversation(1000 * n + i, options.words) for i in range(n)]
            firsts: list[list[float]] = []
            begun = time.perf_counter()
            for round_number in range(options.rounds):
                firsts.append([])
                for chat in chats:
                    answer = side.ask(chat)
                    firsts[-1].append(answer.first_s)
                    chat += [
                        {"role": "assistant", "content": answer.text},
                        {"role": "user", "content": f"And then, part {round_number + 2}?"},
                    ]
            later = [s for seconds in firsts[1:] for s in seconds]
            rows.append(
                {
                    "n": n,
                    "side": side.name,
                    "total_s": time.perf_counter() - begun,
                    "first_round_p50_s": statistics.median(firsts[0]),
                    "later_p50_s": statistics.median(later),
                    "later_p95_s": percentile(later, 95),
                    "private_mb": side.private_mb(),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.stop()
    return rows


def restart_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The same conversation after `kill -9`, with a hot page cache and, where one may drop it, a cold one."""
    rows = []
    for shape in options.shapes:
        model = model_of(shape, options.model, work)
        n_ctx = 8192 + 1024
        home = work / f"restart-{shape}"
        for side in [one for one in (ours(home, model, n_ctx), theirs(model, n_ctx, slots=1)) if one]:
            rows.append({"model": shape} | _restarts(side, home, model, options))
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.stop()
    return rows


def _restarts(side: Side, home: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    side.start()
    chat = conversation(7, options.long_words)
    answer = side.ask(chat)
    chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Why?"}]
    is_ours = side.name == "edgeinfer"
    if is_ours:
        wait_written(home, int(answer.usage["prompt_tokens"]))
    hot = [_restart(side, chat) for _ in range(options.runs if is_ours else 1)]
    row = {
        "side": side.name,
        "prompt_tokens": answer.usage["prompt_tokens"],
        "prefill_s": answer.first_s,
        "exec_to_first_s": statistics.median(r[0] for r in hot),
        "first_s": statistics.median(r[1] for r in hot),
        "computed_tokens": max(r[2] for r in hot),
    }
    if is_ours:
        cold = [_restart(side, chat, lambda: drop(_files(home, model))) for _ in range(3)]
        side.kill()
        files = _files(home, model)
        blocks = sum(path.stat().st_size for path in files if path.suffix == ".block")
        drop(files)
        begun = time.perf_counter()
        for path in files[1:]:
            path.read_bytes()
        row |= {
            "cold_exec_to_first_s": statistics.median(r[0] for r in cold),
            "disk_read_s": time.perf_counter() - begun,
            "blocks_mb": blocks / 1e6,
        }
    return row


def _files(home: Path, model: Path) -> list[Path]:
    """The model, and what a stopped server left of it: snapshot and blocks."""
    return [path for path in (model, *(home / "cache").rglob("*")) if path.is_file()]


def _restart(
    side: Side, chat: Messages, before: Callable[[], None] | None = None
) -> tuple[float, float, int]:
    """Seconds from exec to the first token and from the request to it, and tokens computed."""
    side.kill()
    if before:
        before()
    begun = time.perf_counter()
    side.start()
    healthy = time.perf_counter() - begun
    again = side.ask(chat)
    return healthy + again.first_s, again.first_s, again.computed


def model_of(shape: str, small: Path, work: Path) -> Path:
    """The small model, or one of that shape with random weights."""
    if shape == "small":
        return small
    out = work / f"random-{shape}.gguf"
    if not out.exists():
        command = [sys.executable, str(HERE / "random_gguf.py"), str(small), str(out), *SHAPES[shape]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def edits_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Tokens computed again where a conversation is edited, regenerated, left for another model, or its
    model leaves memory; an attention model and one with a sliding window.
    """
    rows = []
    pair = (options.model, model_path("gemma3"))
    for model, other in (pair, pair[::-1]):
        side = ours(work / f"edits-{name_of(model)}", model, 8192, others=[other])
        side.start()
        for case, answer in _edits(side, name_of(other), options.words).items():
            tokens = answer.usage["prompt_tokens"]
            rows.append(
                {
                    "model": side.model,
                    "case": case,
                    "prompt_tokens": tokens,
                    "computed_tokens": answer.computed,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def _edits(side: Side, other: str, words: int) -> dict[str, Answer]:
    chat = conversation(11, words)
    for turn in range(3):
        answer = side.ask(chat)
        chat += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"More {turn}?"},
        ]
    cases = {"next turn": side.ask(chat)}
    cases["regenerate"] = side.ask(chat)
    cases["edit in the middle"] = side.ask([*chat[:2], {"role": "user", "content": "Something else?"}])
    cases["back to the first branch"] = side.ask(chat)
    shorter = {"role": "assistant", "content": chat[-2]["content"][-20:]}
    dropped = [*chat[:-2], shorter, {"role": "user", "content": "And without the reasoning?"}]
    cases["reasoning dropped"] = side.ask(dropped)
    side.ask(conversation(12, words), model=other)
    cases["after another model"] = side.ask(chat)
    side.unload(side.model)
    cases["after it left memory"] = side.ask(chat)
    side.stop()
    side.start()
    cases["after a restart"] = side.ask(chat)
    return cases


def newcomer_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Short chats, one after the other, while a long prompt is read; as many of them alone afterwards,
    which is what they take from it in any case.
    """
    rows = []
    sides = [ours(work / "newcomer", options.model, 8192), theirs(options.model, 8192)]
    for side in [one for one in sides if one]:
        side.start()
        side.ask(conversation(1, 20), n=2)
        alone = side.ask(conversation(21, options.long_words), n=2).first_s
        long: list[Answer] = []
        reading = threading.Thread(
            target=lambda s, found: found.append(s.ask(conversation(22, options.long_words), n=2)),
            args=(side, long),
        )
        reading.start()
        time.sleep(0.5)
        firsts = []
        for i in range(10):
            if not reading.is_alive():
                break
            firsts.append(side.ask(conversation(100 + i, 12), n=8).first_s)
        reading.join()
        own = sum(side.ask(conversation(200 + i, 12), n=8).total_s for i in range(len(firsts)))
        beside = long[0].first_s
        rows.append(
            {
                "side": side.name,
                "long_alone_s": alone,
                "long_beside_s": beside,
                "newcomers": len(firsts),
                "newcomers_alone_s": own,
                "lost": (beside - own) / alone - 1,
                "first_p50_s": statistics.median(firsts),
                "first_max_s": max(firsts),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def cost_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """What writing costs a stream, and restoring its neighbour."""
    sides = {
        "on": ours(work / "cost-on", options.model, 8192),
        "off": ours(work / "cost-off", options.model, 8192, blocks=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.start()
    for number in range(options.runs):
        for name, side in sides.items():
            answer = side.ask(conversation(500 + number, options.words), n=256, ignore_eos=True)
            rates[name].append((len(answer.stamps) - 1) / (answer.stamps[-1] - answer.stamps[0]))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    rows: list[dict[str, Any]] = [
        {"case": "decode tokens/s, writing", **medians, "ratio": medians["on"] / medians["off"]}
    ]
    on = sides["on"]
    chat = conversation(31, options.long_words)
    answer = on.ask(chat, n=4)
    wait_written(work / "cost-on", int(answer.usage["prompt_tokens"]))
    on.stop()
    on.start()
    on.ask(conversation(32, 12), n=2)
    neighbour: list[Answer] = []
    stream = threading.Thread(
        target=lambda: neighbour.append(on.ask(conversation(33, 12), n=400, ignore_eos=True))
    )
    stream.start()
    time.sleep(0.7)
    restored = on.ask(chat, n=2)
    stream.join()
    stamps = neighbour[0].stamps
    gaps = sorted(b - a for a, b in itertools.pairwise(stamps))
    rows.append(
        {
            "case": "neighbour while restoring",
            "restored_tokens": restored.cached,
            "first_s": restored.first_s,
            "longest_gap_ms": gaps[-1] * 1000,
            "median_gap_ms": statistics.median(gaps) * 1000,
        }
    )
    for side in sides.values():
        side.stop()
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    return rows


# --- the tables


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"


def table(results: dict[str, Any]) -> str:
    """All sections as Markdown."""
    parts = []
    if rows := results.get("turns"):
        parts.append(
            "| conversations, in turn | | all rounds | first token, round 1 | later, p50 | later, p95 |"
            " private memory |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['n']} | {r['side']} | {r['total_s']:.1f} s | {r['first_round_p50_s'] * 1000:.0f} ms"
                f" | {r['later_p50_s'] * 1000:.0f} ms | {r['later_p95_s'] * 1000:.0f} ms"
                f" | {r['private_mb']:.0f} MB |"
                for r in rows
            )
        )
    if rows := results.get("restart"):
        parts.append(
            "| after `kill -9` | | prompt | read at first in | exec → first token | request → first token |"
            " computed again | cold page cache | reading those files |\n|---|---|---|---|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['model']} | {r['side']} | {r['prompt_tokens']} tokens | {r['prefill_s']:.1f} s"
                f" | {_ms(r['exec_to_first_s'])} | {_ms(r['first_s'])}"
                f" | {r['computed_tokens']} tokens | {_ms(r.get('cold_exec_to_first_s'))}"
                f" | {_ms(r.get('disk_read_s'))} |"
                for r in rows
            )
        )
    if rows := results.get("edits"):
        parts.append(
            "| what happens | model | prompt | computed |\n|---|---|---|---|\n"
            + "\n".join(
                f"| {r['case']} | {r['model']} | {r['prompt_tokens']} tokens | {r['computed_tokens']} tokens |"
                for r in rows
            )
        )
    if rows := results.get("newcomer"):
        parts.append(
            "| short chats beside a long read | first token, p50 | worst | the long read alone | beside |"
            " all of the chats alone | the read loses beyond that |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['side']}, {r['newcomers']} of them | {r['first_p50_s'] * 1000:.0f} ms"
                f" | {r['first_max_s'] * 1000:.0f} ms | {r['long_alone_s']:.1f} s | {r['long_beside_s']:.1f} s"
                f" | {r['newcomers_alone_s']:.1f} s | {r['lost']:.0%} |"
                for r in rows
            )
        )
    if rows := results.get("cost"):
        rate, gap = rows
        parts.append(
            "| what it costs | |\n|---|---|\n"
            f"| decode, writing on : off | {rate['on']:.1f} : {rate['off']:.1f} tokens/s, {rate['ratio']:.3f} |\n"
            f"| a neighbour's longest gap while {gap['restored_tokens']} tokens are restored"
            f" | {gap['longest_gap_ms']:.0f} ms (median {gap['median_gap_ms']:.1f}) |"
        )
    return "\n\n".join(parts) + "\n"


SECTIONS = {
    "turns": turns_section,
    "restart": restart_section,
    "edits": edits_section,
    "newcomer": newcomer_section,
    "cost": cost_section,
}


@contextlib.contextmanager
def work_folder(named: str) -> Iterator[Path]:
    """A folder for the homes, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="edgeinfer-memory-", dir=named or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--conversations", default="4,10,40", help="N of `turns`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--words", type=int, default=650, help="words of a conversation: some 1,000 tokens"
    )
    parser.add_argument("--long-words", type=int, default=4600, help="words of a long prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--shapes", default="small", help=f"models of `restart`: small, {', '.join(SHAPES)}"
    )
    parser.add_argument("--model", type=Path, default=None, help="default: the small test model")
    parser.add_argument("--work", default="", help="where the homes are made")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out")
    options = parser.parse_args()
    options.model = options.model or model_path("smollm2")
    options.shapes = options.shapes.split(",")
    options.conversations = [int(n) for n in options.conversations.split(",")]
    results: dict[str, Any] = {}
    with work_folder(options.work) as work:
        for name in options.sections.split(","):
            results[name] = SECTIONS[name](options, work)
    print(write_figure(options.out, "memory", table(results)))
    (options.out / "memory.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
