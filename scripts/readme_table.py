"""Measure all rows of the README's table in one run, alternating with llama-server.

    make bench-readme [ARGS='--out docs/figures']

Runs the benchmarks with arguments that select only these rows. Takes a quarter of an hour on 2 cores,
and 6.5 GB of disk for models with random weights. The row of the model larger than memory is measured
only as root. Writes OUT/readme.md; the benchmarks' own output is in bench-out/readme. `scripts/docs.py`
copies docs/figures/readme.md into the README.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_larger import new_home
from common import ROOT, make_parser, spread, write_figure

from edgeinfer.bench import markdown

#: Folders of the benchmarks' output, and of their models and data: not in /tmp, which may be in memory.
PARTS, WORK = ROOT / "bench-out/readme", ROOT / "bench-out"
MODELS = WORK / "models"
#: Arguments of each benchmark. The dense model of 2.35 GB gets memory for 0.8 of it, and a disk of 1
#: GB/s.
BENCHMARKS = {
    "resume": f"--models small,7b --parts one_token,memory --runs 9 --model-folder {MODELS} --work {WORK}",
    "memory": f"--sections restart --brief --runs 3 --work {WORK}",
    "pictures": "--brief --runs 3 --gap-runs 0",
    "engine": "--models smollm2 --sections shared_prefix --rounds 5",
    "serve": "--models smollm2 --widths 1,16 --rounds 5",
    "larger": "--cases dense-0.8-1 --sides edgeinfer llama-server --rounds 3 --warm 3 --steps 6"
    f" --results {PARTS}/larger.jsonl",
}
Row = list[str]


def run_benchmark(name: str) -> None:
    """Run one of BENCHMARKS in a new EDGEINFER_HOME without builds of snapshots.

    Raises CalledProcessError.
    """
    program = ROOT / f"benchmarks/bench_{name}.py"
    command = [sys.executable, str(program), *BENCHMARKS[name].split(), "--out", str(PARTS)]
    print(f"readme_table: {name}", file=sys.stderr, flush=True)
    with new_home() as home:
        environment = os.environ | {"EDGEINFER_HOME": str(home)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def read_part(file: str) -> Any:
    return json.loads((PARTS / file).read_text("utf-8"))


def compare(title: str, unit: str, *sides: Sequence[float], digits: int = 0) -> Row:
    """Return a row with the values of edgeinfer and llama-server, and the better median in bold."""
    cells = [spread(side, unit, digits) for side in sides]
    medians = [float(cell.split()[0]) for cell in cells]
    best = medians.index(max(medians) if unit == "tokens/s" else min(medians))
    value, _, range_ = cells[best].partition(" (")
    cells[best] = f"**{value}** ({range_}"
    return [title, *cells]


def range_of(medians: dict[str, float]) -> list[float]:
    return [medians["least"], medians["median"], medians["greatest"]]


def launch_rows() -> list[Row]:
    """Return the rows of bench_resume.py; the last one is the disk space of a snapshot."""
    rows, models = [], read_part("resume.json")["models"]
    for name, title in (
        ("7b", "a 7B model's shape, random weights: `exec` → first token of a one-token prompt"),
        ("small", "135M: the same"),
    ):
        firsts = {way: range_of(runs["first_token"]) for way, runs in models[name]["one_token"].items()}
        rows.append(compare(title, "ms", firsts["ours"], firsts["default"]))
        rows[-1][-1] += (
            f"; {spread(firsts['no-repack, no-warmup'], 'ms')} with `--no-repack --no-warmup`"
        )
    private_mb = models["7b"]["memory"]["idle_private_bytes"] / 1e6
    rows.append(["private memory, idle, the same 7B shape", f"**{private_mb:.0f} MB**", "the model's"])
    disk_mb = models["7b"]["snapshot"]["disk_bytes"] / 1e6
    rows.append(["disk for a warm 7B besides the model file", f"{disk_mb:.0f} MB", "**none**"])
    return rows


def memory_row() -> Row:
    sides = read_part("memory-restart.json")
    keys = [f"exec_to_first{kind}_s" for kind in ("_min", "", "_max")]
    title = f"{sides[0]['prompt_tokens']:,} tokens of conversation after `kill -9`: `exec` → next first token"
    return compare(title, "s", *([side[key] for key in keys] for side in sides), digits=2)


def picture_row() -> Row:
    firsts = [side["restarted"] for side in read_part("pictures.json").values()]
    title = "a question about a picture already in the conversation, after `kill -9`: first token"
    return compare(title, "s", *firsts, digits=2)


def shared_prefix_row() -> Row:
    sides = read_part("bench-engine.json")["smollm2"]["shared_prefix"]
    rates = ([side[f"tok_s{kind}"] for kind in ("_min", "", "_max")] for side in sides.values())
    return compare("eight streams that share 500 tokens of prompt", "tokens/s", *rates)


def endpoint_rows() -> list[Row]:
    rows, rounds = [], read_part("serve.json")
    for n_clients, title in ((1, "one stream"), (16, "sixteen streams")):
        rates = {
            row["side"]: [turn["tokens_per_s"] for turn in row["rounds"]]
            for row in rounds
            if row["width"] == n_clients
        }
        sides = rates["edgeinfer"], rates["llama-server"]
        rows.append(compare(f"{title} over HTTP, 135M", "tokens/s", *sides))
    return rows


def larger_row() -> Row:
    runs = [json.loads(line) for line in (PARTS / "larger.jsonl").read_text("utf-8").splitlines()]
    rates = (
        [run["steps_per_s"] for run in runs if run["side"] == side]
        for side in ("edgeinfer", "llama-server")
    )
    title = "a dense model of 2.35 GB, with memory for four fifths of it and a disk of 1 GB/s"
    return compare(title, "tokens/s", *rates, digits=2)


def table() -> str:
    """Return the README's table, made from the benchmarks' output files."""
    *launches, disk = launch_rows()
    rows = [*launches, memory_row(), picture_row(), shared_prefix_row()]
    if (PARTS / "larger.jsonl").exists():
        rows.append(larger_row())
    first = ["first launch of a model", "loads, then builds a snapshot in the background", "loads"]
    return markdown(["", "edgeinfer", "llama-server"], [*rows, *endpoint_rows(), disk, first])


def main() -> None:
    options = make_parser(__doc__).parse_args()
    shutil.rmtree(PARTS, ignore_errors=True)
    WORK.mkdir(exist_ok=True)
    names = list(BENCHMARKS)
    if os.geteuid():
        names.remove("larger")
        left_out = "the row of the model larger than memory is left out: it needs root"
        print(f"readme_table: {left_out}", file=sys.stderr)
    for name in names:
        run_benchmark(name)
    print(write_figure(options.out, "readme", table()))


if __name__ == "__main__":
    main()
