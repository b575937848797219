"""Take the screenshots web.png and playground.png of the web page, in Chromium, with a scripted engine.

.venv/bin/python scripts/page_screenshots.py
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
sys.path[:0] = [str(ROOT), str(ROOT / "tests/made")]
QUESTIONS = {
    "Name three colours of autumn": "Red.",
    "A regular expression for dates": "Sure.",
    "How do I make green tea?": """Here is a **plan** for two cups:

1. Boil half a litre of water.
2. Warm the pot, then add two spoons of `sencha`.
3. Wait one minute at 75 °C.

```python
def grams(cups: int) -> float:
    return 2.5 * cups
```

| tea | °C | minutes |
|---|---|---|
| green | 75 | 1 |
| black | 95 | 4 |
""",
}
#: Tokens of the answer in the playground, with the probability of each.
SKY = {
    "The": 0.93,
    " sky": 0.99,
    " is": 0.61,
    " blue": 0.97,
    " because": 0.88,
    " air": 0.34,
    " scatters": 0.81,
    " short": 0.42,
    " waves": 0.15,
    " most": 0.77,
    ".": 0.9,
}


def main() -> None:
    from browser import chromium
    from fake_engine import Delay, FakeEngine
    from served_endpoint import serving

    from edgeinfer.runtime.events import Logprob, TextDelta, TokenLogprobs
    from edgeinfer.server.web.access import make_code

    sky: list[object] = []
    for word, share in SKY.items():
        top = {word: share, " light": 0.6 * (1 - share), " it": 0.2 * (1 - share)}
        likely = tuple(Logprob(0, text.encode(), math.log(p)) for text, p in top.items())
        sky += [TextDelta(word, (TokenLogprobs(likely[0], likely),)), Delay(0.02)]
    engine = FakeEngine([*([answer] for answer in QUESTIONS.values()), sky])
    with (
        tempfile.TemporaryDirectory() as profile,
        serving(engine, has_page=True) as endpoint,
        chromium(Path(profile, "profile")) as running,
    ):
        page = running.page(width=1000, height=720)
        page.open(f"{endpoint.url}/#code={make_code()}")
        page.wait("document.querySelector('#message')")
        for question in QUESTIONS:
            page.click("button", "New")
            page.wait("document.querySelector('.empty')")
            page.fill("#message", question)
            page.key("Enter")
            page.wait("document.querySelector('.answer .stats')")
        page.shot(FIGURES / "web.png")
        page.js("location.hash = '#playground'")
        page.wait("document.activeElement.name === 'prompt'")
        page.type("Why is the sky blue?")
        page.key("Enter")
        page.wait("document.querySelector('form .primary').textContent === 'Run'")
        page.js("document.querySelector('.tokens').focus()")
        for _ in range(6):
            page.key("ArrowRight")
        page.wait("document.querySelector('.said').textContent.includes('air')")
        page.shot(FIGURES / "playground.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEINFER_HOME"] = home
        main()
