"""`make bench-web`: the page in Chromium. Writes bench-out/web.md.

First paint of reloads without the browser's cache; frames while an answer (50 tokens a second, from a scripted
engine in a process of its own) streams into conversations of several lengths.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, add_out, spread, write_figure

sys.path.insert(0, str(ROOT / "tests/made"))
import itertools

from bench_tui import long_text
from browser import Browser, Page, chromium

from edgeinfer.bench import markdown

#: Name: turns, lines of an answer.
SHAPES = {"empty": (0, 0), "10,000 lines, 60 turns": (60, 334), "10,000 lines, 1,250 turns": (1250, 16)}
FRAME_MS = 1000 / 60
#: The frames' times until the answer ends; with a step (pixels a frame) the conversation is scrolled up meanwhile.
FRAMES = """new Promise((done) => {
  const times = [], log = document.querySelector('.log'), step = (now) => {
    times.push(now); log.scrollTop -= PIXELS;
    document.querySelector('.streaming') ? requestAnimationFrame(step) : done(times);
  };
  requestAnimationFrame(step);
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def fill(turns: int, lines: int) -> int:
    """Store a conversation; return its id."""
    from edgeinfer.chat.history.store import ConversationStore
    from edgeinfer.chat.history.values import Conversation, Turn

    store = ConversationStore.open()
    made = store.create(Conversation(title=f"{turns} turns", model="fake"))
    parent = None
    for number in range(turns):
        role, text = ("assistant", long_text(lines)) if number % 2 else ("user", f"Question {number}")
        parent = store.add(
            Turn(conversation_id=made.id, parent_id=parent, role=role, content=text)  # type: ignore[arg-type]
        ).id
    store.close()
    return made.id


def open_whole(page: Page, turns: int, lines: int) -> None:
    """Open a new conversation with all of its turns."""
    page.js(f"location.hash = '#/{fill(turns, lines) if turns else ''}'")
    page.wait("document.querySelector('.turn')" if turns else "document.querySelector('.empty')")
    if turns > 60:
        page.click("button", "earlier turns")
    page.wait(f"document.querySelectorAll('article').length === {turns}")


def frames(page: Page, pixels: int) -> list[float]:
    """Stream an answer into the open conversation; return the frames' intervals (ms)."""
    page.js("document.querySelector('#message').focus()")
    page.type("go")
    page.key("Enter")
    page.wait("document.querySelector('.streaming .block')")
    times = page.js(FRAMES.replace("PIXELS", str(pixels)))
    return [after - before for before, after in itertools.pairwise(times)]


def measure(browser: Browser, url: str, code: str, runs: int) -> list[list[str]]:
    page = browser.page()
    page.open(f"{url}/#code={code}")
    page.wait("document.querySelector('#message')")
    page.call("Network.setCacheDisabled", cacheDisabled=True)
    paints = []
    for _ in range(runs):
        page.call("Page.reload", ignoreCache=True)
        time.sleep(0.3)
        paints.append(float(page.wait(PAINT)))
    rows = [["first paint, not cached", spread(paints, "ms"), "", "", "≤ 100 ms"]]
    for name, (turns, lines) in SHAPES.items():
        open_whole(page, turns, lines)
        for pixels, what in ((0, "streaming"), (60, "streaming and scrolling"))[: 2 if turns else 1]:
            found = frames(page, pixels)
            late = sum(interval > 1.5 * FRAME_MS for interval in found) / len(found)
            p95 = statistics.quantiles(found, n=20)[-1]
            figures = [f"{statistics.median(found):.1f} ms", f"{p95:.1f} ms", f"{late:.1%}"]
            rows.append([f"a frame: {name}, {what}", *figures, f"{FRAME_MS:.1f} ms"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="reloads")
    parser.add_argument("--words", type=int, default=400, help="of each answer, 50 a second")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGEINFER_HOME"] = f"{folder}/home"
        from edgeinfer.server.web.access import make_code

        file = Path(folder, "port")
        text = " ".join(
            "ends here.\n\n" if n % 30 == 29 else f"**word** {n}" for n in range(options.words)
        )
        program = [sys.executable, str(ROOT / "tests/server/web/endpoint.py"), str(file), "0", text]
        with subprocess.Popen(program, env=os.environ | {"PYTHONPATH": str(ROOT)}) as serving:
            try:
                while not file.exists():
                    time.sleep(0.05)
                with chromium(Path(folder, "profile")) as browser:
                    rows = measure(
                        browser, f"http://127.0.0.1:{file.read_text()}", make_code(), options.runs
                    )
            finally:
                serving.terminate()
    head = ["what", "median", "p95", "late by half a frame or more", "wanted"]
    print(write_figure(options.out, "web", markdown(head, rows)))


if __name__ == "__main__":
    main()
