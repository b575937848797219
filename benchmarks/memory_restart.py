"""`bench_memory.py`'s restarts: the same conversation after `kill -9`, the page cache hot and cold."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import drop, random_model
from memory_sides import Messages, Rows, Side, conversation, ms, ours, theirs, wait_written

from edgeinfer.bench import markdown

_N_CTX = 8192 + 1024
#: A decode step is timed as so many of an answer.
_STEPS = 8


def restart_section(options: argparse.Namespace, work: Path) -> Rows:
    """The same conversation after `kill -9`, with a hot page cache and, where one may drop it, a cold
    one.
    """
    rows = []
    for shape in options.shapes:
        model = model_of(shape, options.model, work)
        home = work / f"restart-{shape}"
        peer = None if options.alone else theirs(model, _N_CTX, slots=1)
        for side in (ours(home, model, _N_CTX), peer):
            if side is None:
                continue
            rows.append({"model": shape} | _restarts(side, home, model, options))
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.stop()
    return rows


def model_of(shape: str, small: Path, work: Path) -> Path:
    """The small model, or one of that shape with random weights."""
    if shape == "small":
        return small
    return random_model(shape, work)


def _restarts(side: Side, home: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    asked = conversation(7, options.long_words)
    row, text = _read_at_first(side, asked, home)
    turn = [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    if side.name != "edgeinfer":
        return row | _summary([_restart(side, asked + turn)])
    wait_written(home, int(row["prompt_tokens"]))
    again = [_restart(side, asked) for _ in range(options.runs)]
    step_s = _decode_step(side, asked)
    hot = [_restart(side, asked + turn) for _ in range(options.runs)]
    cold = [
        _restart(side, asked + turn, lambda: drop(_files(home, model))) for _ in range(options.runs)
    ]
    side.kill()
    files = _files(home, model)
    drop(files)
    begun = time.perf_counter()
    for path in files[1:]:
        path.read_bytes()
    return (
        row
        | _summary(hot)
        | {
            "same_exec_to_first_s": statistics.median(r[0] for r in again),
            "same_computed_tokens": max(r[2] for r in again),
            "step_s": step_s,
            "cold_exec_to_first_s": statistics.median(r[0] for r in cold),
            "disk_read_s": time.perf_counter() - begun,
            "blocks_mb": sum(path.stat().st_size for path in files if path.suffix == ".block") / 1e6,
        }
    )


def _read_at_first(side: Side, asked: Messages, home: Path) -> tuple[dict[str, Any], str]:
    """Return how long (s) an uncached prompt took, and its answer; noted in a home that is retained for
    later runs.
    """
    note = home / f"{side.name}.json"
    if not note.exists():
        side.start()
        answer = side.ask(asked)
        row = {
            "side": side.name,
            "prompt_tokens": answer.usage["prompt_tokens"],
            "prefill_s": answer.first_s
            if answer.cached < answer.usage["prompt_tokens"] // 10
            else None,
        }
        note.write_text(json.dumps([row, answer.text]))
    row, text = json.loads(note.read_text())
    return row, text


def _decode_step(side: Side, chat: Messages) -> float:
    """Seconds of a decode step behind a conversation that is in memory."""
    one, more = (
        min(side.ask(chat, n=n, ignore_eos=True, speculative="off").total_s for _ in range(3))
        for n in (1, 1 + _STEPS)
    )
    return (more - one) / _STEPS


def _summary(found: list[tuple[float, float, int]]) -> dict[str, Any]:
    return {
        "exec_to_first_s": statistics.median(r[0] for r in found),
        "exec_to_first_max_s": max(r[0] for r in found),
        "first_s": statistics.median(r[1] for r in found),
        "computed_tokens": max(r[2] for r in found),
    }


def _files(home: Path, model: Path) -> list[Path]:
    """The model, and what a stopped server left of it: snapshot and blocks, no half-written ones."""
    kept = [path for path in (home / "cache").rglob("*") if not path.name.startswith(".")]
    return [path for path in (model, *kept) if path.is_file()]


def _restart(
    side: Side, chat: Messages, before: Callable[[], None] | None = None
) -> tuple[float, float, int]:
    """Seconds from exec to the first token and from the request to it, and tokens computed.

    The answer is one token: of a model with random weights a first one may be no text.
    """
    side.kill()
    if before:
        before()
    begun = time.perf_counter()
    side.start()
    healthy = time.perf_counter() - begun
    again = side.ask(chat, n=1)
    return healthy + again.total_s, again.total_s, again.computed


def restart_table(rows: Rows) -> str:
    head = [
        "after `kill -9`",
        "",
        "prompt",
        "read at first in",
        "next turn, exec → first token",
        "worst",
        "request → first token",
        "computed",
        "the same prompt again",
        "computed",
        "a decode step there",
        "next turn, cold page cache",
        "reading those files",
    ]
    return markdown(
        head,
        [
            [
                r["model"],
                r["side"],
                f"{r['prompt_tokens']} tokens",
                f"{r['prefill_s']:.1f} s" if r["prefill_s"] else "–",
                *(ms(r[key]) for key in ("exec_to_first_s", "exec_to_first_max_s", "first_s")),
                f"{r['computed_tokens']} tokens",
                ms(r.get("same_exec_to_first_s")),
                f"{r['same_computed_tokens']} tokens" if "same_computed_tokens" in r else "–",
                ms(r.get("step_s")),
                ms(r.get("cold_exec_to_first_s")),
                f"{ms(r['disk_read_s'])} ({r['blocks_mb']:.0f} MB of blocks)"
                if "disk_read_s" in r
                else "–",
            ]
            for r in rows
        ],
    )
