"""`bench_memory.py`'s neighbours: short chats while a long prompt is read, and what writing and restoring
cost a stream.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from memory_sides import Answer, Rows, Side, conversation, ms, ours, theirs, wait_written

from edgeinfer.bench import markdown

_NEWCOMERS = 10
_NEWCOMER_WORDS = 12


def short_chats_section(options: argparse.Namespace, work: Path) -> Rows:
    """Short chats while a long prompt is read: one right after the other, and spread over the read; the
    same chats alone, which is what they take from it in any case.
    """
    rows = []
    for side in (ours(work / "chats", options.model, 8192), theirs(options.model, 8192)):
        if side is None:
            continue
        side.start()
        side.ask(conversation(1, 20), n=2)
        numbers = itertools.count(20)
        alone_s = _read(side, next(numbers), options)
        beside = {
            how: _beside(side, next(numbers), options, pause_s)
            for how, pause_s in _pauses(alone_s).items()
        }
        own = [_chat(side, 900 + i).total_s for i in range(_NEWCOMERS)]
        for how, (read_s, firsts) in beside.items():
            rows.append(
                {
                    "side": side.name,
                    "how": how,
                    "alone_s": alone_s,
                    "beside_s": read_s,
                    "chats": len(firsts),
                    "chats_alone_s": sum(own[: len(firsts)]),
                    "first_p50_s": statistics.median(firsts),
                    "first_max_s": max(firsts),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def _pauses(alone_s: float) -> dict[str, float]:
    """Seconds from the begin of a chat to the next one's, by how they come."""
    return {"in a row": 0.0, "spread": alone_s / (_NEWCOMERS + 1)}


def _read(side: Side, number: int, options: argparse.Namespace) -> float:
    """Seconds until the first token behind a long prompt."""
    return side.ask(conversation(number, options.read_words), n=2).first_s


def _chat(side: Side, number: int) -> Answer:
    return side.ask(conversation(number, _NEWCOMER_WORDS), n=8, ignore_eos=True)


def _beside(
    side: Side, number: int, options: argparse.Namespace, pause_s: float
) -> tuple[float, list[float]]:
    """Return the time (s) of a long prompt, and of each short chat until its first token."""
    took: list[float] = []
    begun = time.monotonic()
    reading = threading.Thread(target=lambda: took.append(_read(side, number, options)))
    reading.start()
    firsts = []
    for i in range(_NEWCOMERS):
        time.sleep(max(0.0, begun + 0.5 + i * pause_s - time.monotonic()))
        if not reading.is_alive():
            break
        firsts.append(_chat(side, 100 * number + i).first_s)
    reading.join()
    return took[0], firsts


def short_chats_table(rows: Rows) -> str:
    head = [
        "short chats beside a long read",
        "",
        "first token, p50",
        "worst",
        "the read alone",
        "beside",
        "all of the chats alone",
        "the read takes longer by",
        "beyond the chats' own time",
    ]
    return markdown(
        head,
        [
            [
                r["side"],
                f"{r['chats']} of them, {r['how']}",
                ms(r["first_p50_s"]),
                ms(r["first_max_s"]),
                *(f"{r[key]:.1f} s" for key in ("alone_s", "beside_s", "chats_alone_s")),
                f"{r['beside_s'] / r['alone_s'] - 1:.0%}",
                f"{(r['beside_s'] - r['chats_alone_s']) / r['alone_s'] - 1:.0%}",
            ]
            for r in rows
        ],
    )


def cost_section(options: argparse.Namespace, work: Path) -> Rows:
    """Measure what writing costs a stream, and restoring costs its neighbour."""
    sides = {
        "on": ours(work / "cost-on", options.model, 8192 + 512),
        "off": ours(work / "cost-off", options.model, 8192 + 512, blocks=False),
    }
    for side in sides.values():
        side.start()
    rows = [_writing(sides, options), _restoring(sides["on"], work / "cost-on", options)]
    for side in sides.values():
        side.stop()
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    return rows


def _writing(sides: dict[str, Side], options: argparse.Namespace) -> dict[str, Any]:
    """Decode rates behind prompts whose blocks are written meanwhile. On that side idle conversations
    leave the cells, on the other they stay (decision 094): the rates differ by both.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(2 * options.runs):
        for name, side in sides.items():
            answer = side.ask(conversation(500 + number, options.words // 2), n=256, ignore_eos=True)
            rates[name].append((len(answer.stamps) - 1) / (answer.stamps[-1] - answer.stamps[0]))
    return {name: statistics.median(found) for name, found in rates.items()} | {
        "range": {name: (min(found), max(found)) for name, found in rates.items()}
    }


def _restoring(side: Side, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A stream's gaps while a long prefix comes back from the disk beside it."""
    chat = conversation(31, options.long_words)
    answer = side.ask(chat, n=4)
    wait_written(home, int(answer.usage["prompt_tokens"]))
    side.stop()
    side.start()
    side.ask(conversation(32, _NEWCOMER_WORDS), n=2)
    neighbour: list[Answer] = []
    stream = threading.Thread(
        target=lambda: neighbour.append(side.ask(conversation(33, 12), n=400, ignore_eos=True))
    )
    stream.start()
    time.sleep(0.7)
    restored = side.ask(chat, n=2)
    stream.join()
    stamps = neighbour[0].stamps
    gaps = sorted(b - a for a, b in itertools.pairwise(stamps))
    return {
        "restored_tokens": restored.cached,
        "first_s": restored.first_s,
        "longest_gap_s": gaps[-1],
        "median_gap_s": statistics.median(gaps),
    }


def cost_table(rows: Rows) -> str:
    rate, gap = rows
    low, high = rate["range"]["on"]
    return markdown(
        ["what it costs", ""],
        [
            [
                "decode, writing on : off",
                f"{rate['on']:.1f} ({low:.1f} to {high:.1f}) : {rate['off']:.1f} tokens/s,"
                f" {rate['on'] / rate['off']:.3f}",
            ],
            [
                f"a neighbour's longest gap while {gap['restored_tokens']} tokens are restored",
                f"{ms(gap['longest_gap_s'])} (median {gap['median_gap_s'] * 1000:.1f} ms);"
                f" first token behind them after {ms(gap['first_s'])}",
            ],
        ],
    )
