"""Draw the README's screenshots: the real app as SVG, with a scripted engine, so that runs are equal.

.venv/bin/python scripts/screenshots.py            write docs/figures/chat-*.svg
.venv/bin/python scripts/screenshots.py --check    fail if these files are not up to date
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tui"), str(ROOT / "tests/made")]
SHOTS = (
    ("chat-dark", "answer_question", (92, 28), "edgeinfer-dark"),
    ("chat-light", "answer_question", (92, 28), "edgeinfer-light"),
    ("chat-commands", "completing", (92, 28), "edgeinfer-dark"),
    ("chat-models", "models", (92, 28), "edgeinfer-dark"),
    ("chat-search", "searching", (92, 28), "edgeinfer-dark"),
)


async def shot(name: str, scene: str, size: tuple[int, int], theme: str) -> str:
    """Return a screenshot as SVG, with `name` instead of the random id."""
    from fixed_chat import NOON, SHELF, make_app
    from scenes import SCENES

    from edgeinfer.config.config_file import ChatConfig
    from edgeinfer.tui.screens import model_picker

    model_picker.list_choices = lambda warm=(): list(SHELF)
    scene_parts = SCENES[scene]()
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEINFER_HOME"] = home
        app = make_app(Path(home), scene_parts.host, config=ChatConfig(theme=theme), clock=lambda: NOON)
        async with app.run_test(size=size) as pilot:
            await scene_parts.prepare(pilot)
            svg = app.export_screenshot(title="edgeinfer")
    return re.sub(r"terminal-\d+", f"terminal-{name}", svg)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FIGURES.mkdir(exist_ok=True)
    stale = []
    for name, scene, size, theme in SHOTS:
        file, svg = FIGURES / f"{name}.svg", asyncio.run(shot(name, scene, size, theme))
        if not file.exists() or file.read_text("utf-8") != svg:
            stale.append(file.name)
            if not check:
                file.write_text(svg, "utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
