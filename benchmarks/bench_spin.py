"""What libgomp's spin count costs and gains: decode rates on an idle machine and beside a busy process,
alternated.

    python benchmarks/bench_spin.py MODEL.gguf [ROUNDS]

Each round runs every setting once, idle and then with one process computing on every second processor
we may use.
"""

import os
import statistics
import subprocess
import sys

from bench_build import measure
from common import head

SETTINGS = ("default", "100000", "10000", "1000", "100", "0")
BUSY = [sys.executable, "-c", "while True: pass"]


def rate(model: str, setting: str) -> float:
    before = os.environ.pop("GOMP_SPINCOUNT", None)
    if setting != "default":
        os.environ["GOMP_SPINCOUNT"] = setting
    try:
        return measure(sys.executable, model)["decode"]
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)
        if before is not None:
            os.environ["GOMP_SPINCOUNT"] = before


def main() -> None:
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    runs = {(setting, busy): [] for setting in SETTINGS for busy in (False, True)}
    for _ in range(rounds):
        for busy in (False, True):
            hogs = [
                subprocess.Popen(BUSY) for _ in range(busy * max(1, len(os.sched_getaffinity(0)) // 2))
            ]
            for setting in SETTINGS:
                runs[setting, busy].append(rate(model, setting))
            for hog in hogs:
                hog.kill()
                hog.wait()
    print(head() + "\n")
    print("| GOMP_SPINCOUNT | idle: decode tokens/s (min to max) | busy |\n| --- | --- | --- |")
    for setting in SETTINGS:
        cells = [runs[setting, busy] for busy in (False, True)]
        print(
            f"| {setting} | "
            + " | ".join(f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in cells)
            + " |"
        )


if __name__ == "__main__":
    main()
