"""`make bench-tui`: the cost of the chat's screen. Writes bench-out/tui.md and bench-out/tui.json.

start      exec → first paint → first token of the answer, resumed and cold, on a pseudo-terminal (the model must be
           pulled and, for "resumed", warm in the home EDGEINFER_HOME)
scroll     a conversation of 10,000 lines: scrolling and streaming, updates/s and processor time
streaming  the engine's tokens/s with the app and without a consumer, alternating
store      200 conversations of 100 turns: list and search
"""

from __future__ import annotations

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

from common import ROOT, make_parser, summary, write_figure

from edgeinfer.bench import markdown

EDGEINFER = Path(sys.executable).with_name("edgeinfer")
PARAGRAPH = "A paragraph with **bold words** and `code` in it, long enough to be wrapped at least once at eighty columns, as most.\n"
CODE = "```python\nfor i in range(10):\n    print(i)  # {}\n```\n"
PROMPT = "Count from one to one hundred in words."


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
        limits = ("--temperature", "0", "--max-tokens", "8")
        os.execv(EDGEINFER, [str(EDGEINFER), "chat", *limits, *arguments])
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


#: Words of the question, the composer and the status line.
_OURS = """
    Say one Ask something writing reading tok s context F help Esc stops smollm m instruct resumed in ms cold
    start you asked for a
""".split()


def _has_answer(text: str) -> bool:
    """Return whether the screen has a word after the question that is not one of _OURS."""
    _, mark, after = text.rpartition("\u276f")
    plain = re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]", " ", after)
    return bool(mark) and not set(re.findall(r"[A-Za-z]+", plain)).issubset(_OURS)


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
        side: dict(
            zip(("first_paint", "first_token"), map(summary, zip(*pairs, strict=True)), strict=True)
        )
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
            answer = Turn(id=2 * number + 2, role="assistant", content=long_text(104))
            question = Turn(id=2 * number + 1, content=f"Question {number}")
            entries += [Question(question), AnswerEntry(answer)]
        began = time.monotonic()
        transcript.show(entries)
        await pilot.pause()
        opened = (time.monotonic() - began) * 1000
        total = sum(len(e.lines(transcript.text_width)) for e in entries)
        transcript._relayout()
        await pilot.pause()

        def scroll(_: int) -> None:
            transcript.scroll_to(y=transcript.scroll_y - 7, animate=False)

        scrolled = await _rate(pilot, updates, scroll)
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
    bare, app = (statistics.median(rates) for rates in sides.values())
    pairs = [1 - app_rate / bare_rate for bare_rate, app_rate in zip(*sides.values(), strict=True)]
    measured = {side: summary(rates) for side, rates in sides.items()}
    return measured | {"cost": 1 - app / bare, "pairs": summary(pairs)}


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
        new = "INSERT INTO conversation VALUES (?, ?, 'm', '', '{}', ?, '', 1, ?, NULL)"
        columns = "id, conversation_id, parent_id, role, content, status, created_ms"
        add = f"INSERT INTO turn ({columns}) VALUES (?, ?, ?, ?, ?, 'complete', 1)"
        store.db.execute("BEGIN")
        for number in range(1, 201):
            store.db.execute(new, (number, f"Conversation {number}", 100 * number, number))
            for turn in range(100):
                first, role = 100 * (number - 1), "assistant" if turn % 2 else "user"
                rare = "zebra" if (number, turn) == (77, 50) else ""
                text = f"turn {turn} of {number}: {PARAGRAPH * 3} {rare}"
                parent = first + turn if turn else None
                store.db.execute(add, (first + turn + 1, number, parent, role, text))
        store.db.execute("COMMIT")
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: store.listing(),
            "search a rare word": lambda: store.search("zebra"),
            "search a word of every turn": lambda: store.search("paragraph wrapped"),
            "search a prefix": lambda: store.search("conv"),
            "open one": lambda: store.turns(77),
        }
        return {name: summary([_time_ms(call) for _ in range(runs)]) for name, call in calls.items()}


def _time_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


# report


def table(figures: dict[str, Any]) -> str:
    rows = []

    def add(name: str, value: dict[str, Any], unit: str = "ms", limit: str = "") -> None:
        ends = f"{value['least']:.1f} … {value['greatest']:.1f}"
        rows.append([name, f"{value['median']:.1f} {unit}", ends, str(value["runs"]), limit])

    for side, values in figures.get("start", {}).items():
        limit = "≤ 200 ms" if side == "resumed" else ""
        add(f"exec → first paint, {side}", values["first_paint"], limit=limit)
        add(f"Enter → first token, {side}", values["first_token"])
    if scroll := figures.get("scroll"):
        for kind in ("scroll", "stream"):
            rate = f"{scroll[kind]['updates_per_s']:.1f} updates/s"
            share = f"{scroll[kind]['core_share']:.0%} of a core"
            rows.append([f"{kind} in {scroll['lines']:,} lines", rate, share, "", "≥ 30/s, < 50 %"])
    if streaming := figures.get("streaming"):
        add("engine into nothing", streaming["nothing"], "tok/s")
        add("engine into the app", streaming["app"], "tok/s")
        rows.append(["cost of showing it", f"{streaming['cost']:.1%}", "", "", "≤ 5 %"])
    for name, value in figures.get("store", {}).items():
        add(f"200 × 100 turns: {name}", value, limit="< 50 ms")
    return markdown(["what", "median", "least … most", "n", "wanted"], rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", default=["start", "scroll", "streaming", "store"])
    parser.add_argument("--runs", type=int, default=12)
    model = "a GGUF for `streaming`; left out: the pulled default"
    parser.add_argument("--model", default="", help=model)
    options = parser.parse_args()
    runs = options.runs
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "start": lambda: bench_start(runs),
        "scroll": lambda: asyncio.run(_scroll(200)),
        "streaming": lambda: bench_streaming(options.model or default_model(), max(5, runs // 2)),
        "store": lambda: bench_store(max(20, runs)),
    }
    record = options.out / "tui.json"
    figures = json.loads(record.read_text()) if record.exists() else {}
    figures |= {name: parts[name]() for name in options.parts}
    print(write_figure(options.out, "tui", table(figures)))
    record.write_text(json.dumps(figures, indent=2))


def default_model() -> str:
    from edgeinfer.config.config_file import load_config
    from edgeinfer.models.reference import resolve

    return resolve(load_config().default_model).files().paths[0]


if __name__ == "__main__":
    main()
