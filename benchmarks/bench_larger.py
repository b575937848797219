"""Measure models larger than memory, compared with llama-server: `make bench-larger`, as root.

    make bench-larger ARGS='--cases dense-0.8-1 mixture-0.5-1 --rounds 3 --out docs/figures'

MODEL-SHARE-RATE: a dense model of 2.35 GB or a mixture of experts of 4.5 GB, in a control group whose
memory limit is that share of the file ("all": no limit), on a disk limited to that rate in GB/s
("full": no limit). The models are on an ext4 image on a loop device with a laptop's read-ahead of 128
KB. The sides take turns. Each starts with nothing of the file in the page cache, prefills a prompt,
then gets that prompt with one more token at a time, so that all compute the same tokens, in steps of
one row. All have the same number of warm-up steps.

`--before PROGRAM` measures another build of edgeinfer. `--results FILE` appends each run as a line of
JSON, and `--table` only makes the table from it, so that a measurement can be split.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import msgspec
from common import (
    ROOT,
    call,
    drop,
    make_parser,
    model_path,
    new_home,
    peer_command,
    peer_program,
    spread,
    tree_of,
    write_figure,
)
from peer_server import EDGEINFER, Side

from edgeinfer.bench import markdown
from edgeinfer.platform.machine import read_rate

#: Name → options of `random_gguf.py`.
MODELS = {
    "dense": "--layers 36 --width 2560 --feed-forward 9728".split(),
    "mixture": "--layers 24 --width 2048 --feed-forward 768 --experts 64".split(),
}
#: Size of the image, which holds both models, and the read-ahead of its disk: a laptop's.
IMAGE_BYTES, READ_AHEAD_KB = 7_600_000_000, 128
#: Size of the tests' vocabulary, of which texts are made, and number of topics of `random_gguf.py`.
VOCABULARY, TOPICS = 49_152, 16
_N_CTX = 1024
_GROUPS = Path("/sys/fs/cgroup")


class Case(NamedTuple):
    """One measurement. Limits are `share`, memory as a part of the model's file, and `disk` (GB/s).

    0.0 means no limit.
    """

    model: str
    share: float
    disk: float

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read MODEL-SHARE-RATE. Raises ValueError."""
        model, *limits = text.split("-")
        if model not in MODELS or len(limits) != 2:
            raise ValueError(text)
        return cls(model, *(float(limit) if limit not in ("all", "full") else 0.0 for limit in limits))

    def __str__(self) -> str:
        return f"{self.model}-{self.share or 'all'}-{self.disk or 'full'}"


class Run(msgspec.Struct, frozen=True):
    """One run of a side: rates in tokens/s, of prefill and of steps of one token.

    `read_bytes` were read in the steps, `disk_bytes_per_s` is the disk's rate, and `digest` is that of
    the tokens that the steps sampled.
    """

    case: str
    side: str
    prefill_per_s: float
    n_steps: int
    steps_per_s: float
    read_bytes: int
    disk_bytes_per_s: float
    digest: str


def text(n: int) -> list[int]:
    """Return `n` tokens that change their topic every twenty tokens or so."""
    rng, topic = random.Random(5), 0
    tokens = []
    for _ in range(n):
        if rng.random() < 0.05:
            topic = rng.randrange(TOPICS)
        tokens.append(rng.randrange(VOCABULARY // TOPICS) * TOPICS + topic)
    return tokens


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of the models: a mounted one, or the image's, which is mounted meanwhile."""
    if options.mounted:
        yield options.mounted
        return
    with image(options.work, options.models) as mount:
        yield mount


@contextmanager
def image(folder: Path, models: Sequence[str]) -> Iterator[Path]:
    """Mount `folder`/larger.img with `models`, which are made if missing; yield the mount."""
    path, mount = folder / "larger.img", folder / "larger"
    is_new = not path.exists()
    if is_new:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(path)], check=True)
    loop = ["losetup", "--find", "--show", "--direct-io=on", str(path)]
    device = subprocess.run(loop, check=True, capture_output=True, text=True).stdout.strip()
    mount.mkdir(exist_ok=True)
    try:
        subprocess.run(["mount", device, str(mount)], check=True)
        number = device_of(mount)
        Path(f"/sys/class/bdi/{number}/read_ahead_kb").write_text(str(READ_AHEAD_KB))
        for name in models:
            make_model(name, mount)
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=False)
        subprocess.run(["losetup", "--detach", device], check=False)


def device_of(path: Path) -> str:
    """Return MAJOR:MINOR of the device that a file lies on."""
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def make_model(name: str, mount: Path) -> None:
    """Make a model unless a complete one exists."""
    out = mount / f"{name}.gguf"
    if not out.exists():
        program, new = Path(__file__).with_name("random_gguf.py"), out.with_suffix(".new")
        command = [sys.executable, program, model_path("smollm2"), new, "--different", *MODELS[name]]
        subprocess.run(command, check=True)
        new.rename(out)
        os.sync()


@contextmanager
def group(limit_bytes: int, device: str, bytes_per_s: int) -> Iterator[list[Path]]:
    """Make control groups with a memory limit and a limit of a device's reads, 0 for none; yield their
    folders.
    """
    is_v1 = (_GROUPS / "memory/memory.limit_in_bytes").exists()
    if is_v1:
        limits = [("memory", "memory.limit_in_bytes", str(limit_bytes) if limit_bytes else "")]
        held = f"{device} {bytes_per_s}" if bytes_per_s else ""
        limits.append(("blkio", "blkio.throttle.read_bps_device", held))
    else:
        held = f"{device} rbps={bytes_per_s}" if bytes_per_s else ""
        limits = [("", "memory.max", str(limit_bytes or "max")), ("", "io.max", held)]
    folders = []
    try:
        for controller, file, value in limits:
            folder = _GROUPS / controller / f"edgeinfer-bench-{os.getpid()}"
            folder.mkdir(exist_ok=True)
            folders.append(folder)
            if value:
                (folder / file).write_text(value)
        yield folders
    finally:
        for folder in dict.fromkeys(folders):
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """Remove a control group once its processes have ended."""
    for _ in range(100):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def make_side(name: str, command: list[str], model: Path, home: Path, folders: list[Path]) -> Side:
    """Make a side: `edgeinfer`, another build of it (`before`), or `llama-server`, in the groups."""
    if name == "llama-server":
        command = peer_command(command[0], model, "PORT", slots=1, n_ctx=_N_CTX)
        # repacked weights would be a second copy, which exceeds every limit
        flags = ["--no-repack", "--no-warmup"]
    else:
        flags = ["serve", str(model), *f"--log off --ctx {_N_CTX} --parallel 1 --port PORT".split()]
    join = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in folders)
    shell = ["sh", "-c", f'{join}exec "$@"', "sh"]
    return Side(name, [*shell, *command, *flags], "", {"EDGEINFER_HOME": str(home)})


def complete(port: int, prompt: list[int]) -> str:
    """Compute the new tokens of `prompt` and sample one; return its text."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    return str(call(port, "/v1/completions", body)["choices"][0]["text"])


def read_by(pid: int) -> int:
    """Return the bytes that a process and its descendants have read from disks."""
    n_bytes = 0
    for child in tree_of(pid):
        try:
            fields = Path(f"/proc/{child}/io").read_text().split()
        except OSError:
            continue
        n_bytes += int(fields[fields.index("read_bytes:") + 1])
    return n_bytes


def wait_idle(pid: int) -> None:
    """Wait until a server reads nothing: edgeinfer checks its prefix cache once, in steps after the
    first answers.
    """
    n_bytes = -1
    while n_bytes != (n_bytes := read_by(pid)):
        time.sleep(1)


def measure(side: Side, case: Case, options: argparse.Namespace, disk_rate: float) -> Run:
    """Start a side, and measure the prompt and steps, for a limited time."""
    tokens = text(options.prefill + options.warm + options.steps)
    side.start()
    try:
        began = time.perf_counter()
        sampled = [complete(side.port, tokens[: options.prefill])]
        prefill_s = time.perf_counter() - began
        for n in range(options.warm):
            sampled.append(complete(side.port, tokens[: options.prefill + n + 1]))
        wait_idle(side.pid)
        read, began = read_by(side.pid), time.perf_counter()
        n_steps = 0
        for n in range(options.steps):
            sampled.append(complete(side.port, tokens[: options.prefill + options.warm + n + 1]))
            n_steps += 1
            if time.perf_counter() - began > options.seconds:
                break
        took_s = time.perf_counter() - began
        read = read_by(side.pid) - read
    finally:
        side.stop()
    first = "\0".join(sampled[: options.warm + 1])  # the same number for every side
    return Run(
        case=str(case),
        side=side.name,
        prefill_per_s=options.prefill / prefill_s,
        n_steps=n_steps,
        steps_per_s=n_steps / took_s,
        read_bytes=read,
        disk_bytes_per_s=disk_rate,
        digest=hashlib.sha256(first.encode()).hexdigest()[:8],
    )


def sides_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each side that was requested and exists."""
    peer = peer_program("llama-server")
    commands = {
        "edgeinfer": EDGEINFER,
        "before": [options.before] if options.before else [],
        "llama-server": [peer] if peer else [],
    }
    return {name: commands[name] for name in options.sides if commands[name]}


def run_all(options: argparse.Namespace) -> None:
    """Measure all cases, the sides in turn, and append each run to the results."""
    with model_folder(options) as mount:
        for _, case in itertools.product(range(options.rounds), options.cases):
            for name, command in sides_of(options).items():
                model = mount / f"{case.model}.gguf"
                drop([model])
                held, limit = int(case.disk * 1e9), int(case.share * model.stat().st_size)
                # a home for each run: another run's prefix cache would save the prefill
                with group(limit, device_of(model), held) as folders, new_home() as home:
                    side = make_side(name, command, model, home, folders)
                    run = measure(side, case, options, held or read_rate(model))
                line = msgspec.json.encode(run).decode()
                print(line, file=sys.stderr)
                with open(options.results, "a") as file:
                    file.write(line + "\n")


def table(runs: Sequence[Run]) -> str:
    """Return a row for each case and side, medians with minimum and maximum."""
    rows = []
    for case, side in dict.fromkeys((run.case, run.side) for run in runs):
        same = [run for run in runs if (run.case, run.side) == (case, side)]
        per_step = [run.read_bytes / run.n_steps for run in same]
        shares = [
            n * run.steps_per_s / run.disk_bytes_per_s for n, run in zip(per_step, same, strict=True)
        ]
        disk = statistics.median(run.disk_bytes_per_s for run in same) / 1e9
        prefill = spread([run.prefill_per_s for run in same], "", 1)
        steps = spread([run.steps_per_s for run in same], "", 2), str(min(run.n_steps for run in same))
        read = f"{statistics.median(per_step) / 1e6:,.0f} MB"
        share = f"{statistics.median(shares):.0%} of {disk:.2f} GB/s"
        sampled = " ".join(sorted({run.digest for run in same}))
        rows.append([case, side, prefill, *steps, read, share, sampled, str(len(same))])
    head = ["case", "side", "prefill, tokens/s", "one row, tokens/s", "steps", "read a step"]
    return markdown([*head, "of the disk", "sampled", "runs"], rows)


def main() -> None:
    parser = make_parser(__doc__)
    every = [
        f"{model}-{share}-{disk}"
        for disk in (1, "full")
        for share in (0.8, 0.5, 0.25)
        for model in MODELS
    ]
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=list(map(Case.parse, every)))
    parser.add_argument("--sides", nargs="+", default=["edgeinfer", "before", "llama-server"])
    parser.add_argument("--before", default="", metavar="PROGRAM", help="edgeinfer of another build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--warm", type=int, default=8, help="warm-up steps before the measured ones")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=30.0, help="most seconds for the steps")
    work = ROOT / "bench-out/larger"
    parser.add_argument("--work", type=Path, default=work, help="folder of the image, 8 GB")
    mounted = "folder of dense.gguf and mixture.gguf"
    parser.add_argument("--mounted", type=Path, metavar="FOLDER", help=mounted)
    parser.add_argument("--models", nargs="*", default=None, choices=MODELS, help="to make first")
    parser.add_argument("--results", type=Path, default=ROOT / "bench-out/larger.jsonl")
    parser.add_argument("--table", action="store_true", help="only make the table from the results")
    options = parser.parse_args()
    if options.models is None:
        options.models = sorted({case.model for case in options.cases})
    if not options.table:
        if os.geteuid():
            raise SystemExit(
                "error: memory control groups and loop devices need root: sudo make bench-larger"
            )
        if not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
            raise SystemExit(
                "error: losetup and mkfs.ext4 are missing: apt install util-linux e2fsprogs"
            )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers, groups and mounts end with it
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.touch()
        run_all(options)
    lines = options.results.read_bytes().splitlines()
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    print(write_figure(options.out, "larger", table(runs)))


if __name__ == "__main__":
    main()
