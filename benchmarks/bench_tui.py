"""`make bench-tui`: the cost of the chat's screen. Writes bench-out/tui.md and bench-out/tui.json.

start      exec → first paint → first token of the answer, resumed and cold, on a pseudo-terminal (the model must be
           pulled and, for "resumed", warm in the home EDGEINFER_HOME)
scroll     a conversation of 10,000 lines: scrolling and streaming, updates/s and processor time
streaming  the engine's tokens/s with the app and without a consumer, alternating
store      200 conversations of 100 turns: list and search
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, write_figure

EDGEINFER = Path(sys.executable).with_name("edgeinfer")
PARAGRAPH = "A paragraph with **bold words** and `code` in it, long enough to be wrapped at least once at eighty columns, as most.\n"
CODE = "```python\nfor i in range(10):\n    print(i)  # {}\n```\n"
PROMPT = "Count from one to one hundred in words."


def spread(values: list[float], unit: str) -> dict[str, Any]:
    """Return median, minimum and maximum."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "unit": unit,
    }


# start


def at_terminal(arguments: list[str]) -> tuple[float, float]:
    """Return milliseconds from exec to the composer on the screen, and from Enter to the answer's first
    word.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in (0, 1, 2):
            os.dup2(slave, fd)
        os.environ["TERM"] = "xterm-256color"
        os.execv(
            EDGEINFER, [str(EDGEINFER), "chat", "--temperature", "0", "--max-tokens", "8", *arguments]
        )
    os.close(slave)
    seen = Screen(master)
    painted = seen.until(lambda text: "Ask something" in text) - began
    seen.until(lambda text: "context" in text)
    asked = time.monotonic()
    os.write(master, b"Say one.\r")
    first = seen.until(_has_answer) - asked
    os.write(master, b"\x11")
    seen.drain()
    os.waitpid(pid, 0)
    os.close(master)
    return painted * 1000, first * 1000


_OURS = frozenset(
    re.findall(
        r"[A-Za-z]+",
        "Say one. Ask something writing reading tok/s context F1 help Esc stops smollm2-135m-instruct "
        "resumed in ms"
        " cold start you asked for a",
    )
)


def _has_answer(text: str) -> bool:
    """Return whether the screen has a word after the question that is neither ours nor the status
    line's.
    """
    _, mark, after = text.rpartition("\u276f")
    plain = re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]", " ", after)
    return bool(mark) and any(word not in _OURS for word in re.findall(r"[A-Za-z]+", plain))


class Screen:
    """The output to a pseudo-terminal, as text."""

    def __init__(self, fd: int) -> None:
        self.fd, self.text = fd, ""

    def until(self, condition: Callable[[str], bool], seconds: float = 60.0) -> float:
        """Wait for a condition; return the moment at which it held."""
        deadline = time.monotonic() + seconds
        while not condition(self.text):
            if time.monotonic() > deadline:
                raise SystemExit(f"the terminal did not show it; its last output: {self.text[-500:]!r}")
            if select.select([self.fd], [], [], 0.2)[0]:
                self.text += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
        return time.monotonic()

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self.fd, 1 << 16):
                pass


def bench_start(runs: int) -> dict[str, Any]:
    sides = {"resumed": ["--resume=always"], "cold": ["--resume=never"]}
    times_by_side: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(runs):
        for side, arguments in sides.items():
            times_by_side[side].append(at_terminal(arguments))
    return {
        side: {
            "first_paint": spread([p for p, _ in pairs], "ms"),
            "first_token": spread([f for _, f in pairs], "ms"),
        }
        for side, pairs in times_by_side.items()
    }


# scroll and streaming, in this process without a terminal


def long_text(lines: int) -> str:
    parts, count = [], 0
    while count < lines:
        parts.append(PARAGRAPH if len(parts) % 6 else CODE.format(len(parts)))
        count += 3 if len(parts) % 6 != 1 else 5
    return "\n".join(parts)


async def _scroll(updates: int) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "tests/tui"), str(ROOT / "tests/made")]
    from fake_engine import FakeEngine
    from fixed_chat import FixedHost, make_app, wait_until

    from edgeinfer.chat.history.values import Turn
    from edgeinfer.tui.drawing.entry import AnswerEntry, Question

    app = make_app(Path(tempfile.mkdtemp()), FixedHost(FakeEngine()))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.chat.session.engine is not None)
        transcript = app.chat.transcript
        entries = []
        for number in range(100):
            entries.append(Question(Turn(id=2 * number + 1, content=f"Question {number}")))
            entries.append(
                AnswerEntry(Turn(id=2 * number + 2, role="assistant", content=long_text(104)))
            )
        began = time.monotonic()
        transcript.show(entries)
        await pilot.pause()
        opened = (time.monotonic() - began) * 1000
        total = sum(len(e.lines(transcript.text_width)) for e in entries)
        transcript._relayout()
        await pilot.pause()
        scrolled = await _rate(
            pilot, updates, lambda _: transcript.scroll_to(y=transcript.scroll_y - 7, animate=False)
        )
        transcript.scroll_end(animate=False)
        await pilot.pause()
        growing = AnswerEntry(Turn(id=999, role="assistant", status="streaming"), streaming=True)
        transcript.add(growing)

        def grow(number: int) -> None:
            growing.grow("word after word " if number % 9 else "ends here.\n\n", "")
            transcript.redrawn(growing)

        streamed = await _rate(pilot, updates, grow)
    return {"lines": total, "opened_ms": opened, "scroll": scrolled, "stream": streamed}


async def _rate(
    pilot: Any, updates: int, step: Callable[[int], None], per_s: float = 40.0
) -> dict[str, float]:
    """Make updates at up to `per_s`; return how many per second were painted, and the share of a core
    that they took.
    """
    app, painted = pilot.app, 0

    def count() -> None:
        nonlocal painted
        painted += 1

    app.post_display_hook = count
    cpu, began = time.process_time(), time.monotonic()
    due = began
    for number in range(updates):
        step(number)
        due = max(due + 1 / per_s, time.monotonic())  # no bursts to catch up: late updates stay late
        await asyncio.sleep(due - time.monotonic())
    wall = time.monotonic() - began
    return {"updates_per_s": painted / wall, "core_share": (time.process_time() - cpu) / wall}


def bench_streaming(model: str, rounds: int) -> dict[str, Any]:
    """Measure the engine's tokens/s without a consumer and with the app on a headless screen,
    alternating.
    """
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    engine = load_engine(ModelFiles(name="bench", paths=(model,)), LoadOptions(n_ctx=4096))
    sides: dict[str, list[float]] = {"nothing": [], "app": []}
    for _ in range(rounds):
        sides["nothing"].append(_into_nothing(engine))
        sides["app"].append(asyncio.run(_into_app(engine)))
    engine.close()
    bare, app = statistics.median(sides["nothing"]), statistics.median(sides["app"])
    pairs = [1 - a / n for n, a in zip(sides["nothing"], sides["app"], strict=True)]
    return {
        "nothing": spread(sides["nothing"], "tok/s"),
        "app": spread(sides["app"], "tok/s"),
        "cost": 1 - app / bare,
        "pairs": spread(pairs, ""),
    }


def _into_nothing(engine: Any) -> float:
    from edgeinfer.runtime.events import Finished
    from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

    request = GenerateRequest(
        messages=(Message(role="user", content=PROMPT),),
        sampling=Sampling(temperature=0.0),
        max_tokens=256,
        ignore_eos=True,
        cache_prompt=False,
    )
    last_event = next(e for e in engine.submit(request) if isinstance(e, Finished))
    return last_event.timings.decode_tokens_per_s(last_event.usage.completion_tokens)


async def _into_app(engine: Any) -> float:
    sys.path[:0] = [str(ROOT / "tests/tui"), str(ROOT / "tests/made")]
    from fixed_chat import FixedHost, make_app, wait_until

    class Endless:
        """The engine, with answers up to the token limit."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def close(self) -> None:
            pass

        def submit(self, request: Any) -> Any:
            import msgspec

            return engine.submit(msgspec.structs.replace(request, ignore_eos=True, cache_prompt=False))

    app = make_app(Path(tempfile.mkdtemp()), FixedHost(Endless()))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.chat.session.engine is not None)
        app.chat.session.set(sampling={"temperature": 0.0, "max_tokens": 256})
        app.chat.send(PROMPT, None)
        while app.chat.streaming is not None:
            await asyncio.sleep(0.05)
        return app.chat.session.head.stats.tokens_per_s


# store


def bench_store(runs: int) -> dict[str, Any]:
    from edgeinfer.chat.history.store import ConversationStore

    with tempfile.TemporaryDirectory() as folder:
        store = ConversationStore.open(Path(folder) / "c.db")
        store.db.execute("BEGIN")
        for number in range(1, 201):
            store.db.execute(
                "INSERT INTO conversation VALUES (?, ?, 'm', '', '{}', ?, '', 1, ?, NULL)",
                (number, f"Conversation {number}", 100 * number, number),
            )
            for turn in range(100):
                text = f"turn {turn} of {number}: {PARAGRAPH * 3} {'zebra' if (number, turn) == (77, 50) else ''}"
                store.db.execute(
                    "INSERT INTO turn (id, conversation_id, parent_id, role, content, status, "
                    "created_ms)"
                    " VALUES (?, ?, ?, ?, ?, ?, 1)",
                    (
                        100 * (number - 1) + turn + 1,
                        number,
                        100 * (number - 1) + turn if turn else None,
                        "assistant" if turn % 2 else "user",
                        text,
                        "complete",
                    ),
                )
        store.db.execute("COMMIT")
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: store.listing(),
            "search a rare word": lambda: store.search("zebra"),
            "search a word of every turn": lambda: store.search("paragraph wrapped"),
            "search a prefix": lambda: store.search("conv"),
            "open one": lambda: store.turns(77),
        }
        return {
            name: spread([_time_ms(call) for _ in range(runs)], "ms") for name, call in calls.items()
        }


def _time_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


# report


def table(figures: dict[str, Any]) -> str:
    rows = [("what", "median", "least … most", "n", "wanted"), ("---",) * 5]

    def add(name: str, value: dict[str, Any], limit: str = "") -> None:
        unit = value["unit"]
        rows.append(
            (
                name,
                f"{value['median']:.1f} {unit}",
                f"{value['min']:.1f} … {value['max']:.1f}",
                str(value["n"]),
                limit,
            )
        )

    for side, values in figures.get("start", {}).items():
        add(
            f"exec → first paint, {side}",
            values["first_paint"],
            "≤ 200 ms" if side == "resumed" else "",
        )
        add(f"Enter → first token, {side}", values["first_token"])
    if "scroll" in figures:
        scroll = figures["scroll"]
        for kind in ("scroll", "stream"):
            rate = f"{scroll[kind]['updates_per_s']:.1f} updates/s"
            rows.append(
                (
                    f"{kind} in {scroll['lines']:,} lines",
                    rate,
                    f"{scroll[kind]['core_share']:.0%} of a core",
                    "",
                    "≥ 30/s, < 50 %",
                )
            )
    if "streaming" in figures:
        streaming = figures["streaming"]
        add("engine into nothing", streaming["nothing"])
        add("engine into the app", streaming["app"])
        rows.append(("cost of showing it", f"{streaming['cost']:.1%}", "", "", "≤ 5 %"))
    for name, value in figures.get("store", {}).items():
        add(f"200 × 100 turns: {name}", value, "< 50 ms")
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["start", "scroll", "streaming", "store"])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument(
        "--model", default="", help="a GGUF for `streaming`; left out: the pulled default"
    )
    options = parser.parse_args()
    out = ROOT / "bench-out"
    out.mkdir(exist_ok=True)
    record = out / "tui.json"
    figures = json.loads(record.read_text()) if record.exists() else {}
    for section in options.parts:
        if section == "start":
            figures[section] = bench_start(options.runs)
        elif section == "scroll":
            figures[section] = asyncio.run(_scroll(200))
        elif section == "streaming":
            figures[section] = bench_streaming(
                options.model or default_model(), max(5, options.runs // 2)
            )
        elif section == "store":
            figures[section] = bench_store(max(20, options.runs))
    record.write_text(json.dumps(figures, indent=2))
    print(write_figure(out, "tui", table(figures)))


def default_model() -> str:
    from edgeinfer.config.config_file import load_config
    from edgeinfer.models.reference import resolve

    return resolve(load_config().default_model).files().paths[0]


if __name__ == "__main__":
    main()
