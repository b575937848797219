"""Shared parts of the benchmarks: the tests' models, llama.cpp's own programs, the head of a figure."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.platform.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(
    os.environ.get("EDGEINFER_BUILD_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeinfer-build"
)
#: Folder of models pulled by `scripts/setup.sh bench` (and `test`): NAME/FILE, as in a store.
MODELS = Path(os.environ.get("EDGEINFER_TEST_MODELS") or CACHE / "test-home/data/models")
NAMES = {
    "smollm2": "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m/gemma-3-270m-q4_k_m.gguf",
}


#: Shapes of models with random weights: options of `random_gguf.py`.
SHAPES = {
    "0.6b": "--layers 28 --width 1024 --feed-forward 3072 --key-value-heads 8 --head-size 64"
    " --context 16384".split(),
    "4b": "--layers 36 --width 2560 --feed-forward 9728 --key-value-heads 8 --head-size 128"
    " --context 16384".split(),
    "7b": "--context 16384".split(),
    "8b": "--feed-forward 14336 --key-value-heads 8 --context 16384".split(),
}


def model_path(name: str) -> Path:
    """Find the file of one of NAMES, or make a SHAPE-TYPE (`4b-q4_k_m`) of random weights in bench-out/models.

    Raises SystemExit if a model of NAMES was not pulled.
    """
    if name not in NAMES:
        return random_model(name, ROOT / "bench-out/models")
    path = MODELS / NAMES[name]
    if not path.is_file():
        raise SystemExit(f"error: {path} is missing\n\nhint: scripts/setup.sh bench pulls it")
    return path


def random_model(name: str, folder: Path) -> Path:
    """Make a model of SHAPE or SHAPE-TYPE in `folder` unless it exists. Raises SystemExit."""
    shape, _, kind = name.partition("-")
    if shape not in SHAPES:
        raise SystemExit(
            f"error: no model {name}\n\nhint: {', '.join([*NAMES, *SHAPES])} or SHAPE-TYPE"
        )
    out = folder / f"random-{name}.gguf"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        program = Path(__file__).with_name("random_gguf.py")
        command = [sys.executable, str(program), str(model_path("smollm2")), str(out), *SHAPES[shape]]
        subprocess.run([*command, "--type", kind or "q4_0"], check=True, stdout=subprocess.DEVNULL)
    return out


def model_of(shape: str, small: Path, folder: Path) -> Path:
    """Return `small`, or make a model of `shape` with random weights in `folder`."""
    return small if shape == "small" else random_model(shape, folder)


def link_model(name: str, folder: Path) -> Path:
    """Put `small` (the tests' SmolLM2) or a model of `model_path` into `folder` as NAME.gguf, readable
    by other users.
    """
    source, out = model_path("smollm2" if name == "small" else name), folder / f"{name}.gguf"
    try:
        os.link(source, out)
    except OSError:  # another file system
        shutil.copyfile(source, out)
    out.chmod(0o644)
    return out


def peer_program(name: str) -> str | None:
    """Find llama-server or llama-bench: EDGEINFER_LLAMA_SERVER's folder, the fetched one, otherwise
    PATH.
    """
    named = os.environ.get("EDGEINFER_LLAMA_SERVER")
    folders = [Path(named).parent] if named else [CACHE / "llama-server/bin"]
    fetched = next((str(f / name) for f in folders if (f / name).is_file()), None)
    return fetched or shutil.which(name)


def peer_command(
    program: str, model: Path, port: int | str, *, slots: int, n_ctx: int, threads: int = 2
) -> list[str]:
    """Return the command of a llama-server, whose context has `n_ctx` cells for all slots together."""
    shape = f"--port {port} -np {slots} -c {n_ctx} -t {threads}"
    return [program, "-m", str(model), "--host", "127.0.0.1", *shape.split(), "--no-webui"]


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree_of(pid: int) -> list[int]:
    """List a process and all its descendants, also those in other namespaces."""
    pids = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():  # children of every thread
            for child in (task / "children").read_text().split():
                pids += tree_of(int(child))
    return pids


def memory_of(pid: int, *kinds: str) -> int:
    """Return the sum of `kinds` of memory (names in /proc/PID/smaps_rollup) of a process, in bytes; 0
    once it has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in kinds)


def biggest_below(pid: int) -> int:
    """Return the descendant with the most memory, which has the model."""
    return max(tree_of(pid)[1:], key=lambda child: memory_of(child, "Rss"))


@contextlib.contextmanager
def new_home() -> Iterator[Path]:
    """Make a home of edgeinfer that builds no snapshots: a build would go on after the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config").mkdir()
        (Path(folder) / "config/config.toml").write_text("[snapshots]\nauto-warm = false\n")
        yield Path(folder)


@contextlib.contextmanager
def process(command: Sequence[str | Path], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server without terminal and output until the block ends. `settings` are those of Popen."""
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    started = subprocess.Popen(command, **{**quiet, "cwd": ROOT, **settings})
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_healthy(port: int, started: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Wait until an endpoint of this machine answers GET /health with 200. Raises SystemExit."""
    deadline = time.monotonic() + seconds
    while started.poll() is None and time.monotonic() < deadline:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(link), contextlib.suppress(OSError):
            link.request("GET", "/health")
            if link.getresponse().status == 200:
                return
        time.sleep(0.002)
    raise SystemExit(f"error: {started.args}: no healthy endpoint, exit status {started.poll()}")


def call(port: int, path: str, body: object = None, method: str = "POST") -> Any:
    """Send a request to an endpoint of this machine, and return its JSON reply.

    While nothing listens at the port, the request is repeated. Raises SystemExit after two minutes of
    that, and for a status other than 200.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
        with contextlib.closing(link), contextlib.suppress(ConnectionRefusedError):
            headers = {"Content-Type": "application/json"}
            link.request(method, path, body and json.dumps(body), headers)
            response = link.getresponse()
            reply = response.read()
            if response.status != 200:
                raise SystemExit(f"error: {path}: {response.status}: {reply[:400]!r}")
            return json.loads(reply)
        time.sleep(0.01)
    raise SystemExit(f"error: nothing answers on port {port}")


class LineProcess:
    """A Python program that answers each line of its standard input with a line."""

    def __init__(self, *arguments: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, *arguments], text=True, bufsize=1, **pipes)

    def read(self) -> str:
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self._process.stdin.write(f"{line}\n")
        return self.read()

    def close(self) -> None:
        self._process.communicate()


def drop(files: list[Path]) -> None:
    """Drop files from the page cache that are on disk and not mapped."""
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def percentile(values: list[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median of a measurement, with minimum, maximum and number of its runs."""
    ends = {"least": min(values), "greatest": max(values)}
    return {"median": statistics.median(values), **ends, "runs": len(values)}


def spread(values: Sequence[float], unit: str, digits: int = 0) -> str:
    """Format the median of a measurement in its unit, with minimum and maximum."""
    return describe(summary(values), unit, digits)


def describe(measured: dict[str, float], unit: str, digits: int = 0) -> str:
    """Format a `summary` in its unit."""
    middle, low, high = (f"{measured[key]:.{digits}f}" for key in ("median", "least", "greatest"))
    return " ".join(filter(None, [middle, unit, f"({low}–{high})"]))


def make_parser(text: str) -> argparse.ArgumentParser:
    """Make a parser whose help shows `text`, with `--out`, the folder that `write_figure` writes to."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    out: dict[str, Any] = {"type": Path, "default": ROOT / "bench-out", "metavar": "FOLDER"}
    parser.add_argument("--out", **out, help="docs/figures: for the docs")
    return parser


def numbers(text: str) -> list[int]:
    """Read a list of numbers, as in `1,2,4`: the type of an option."""
    return [int(word) for word in text.split(",")]


def write_figure(folder: Path, name: str, table: str) -> str:
    """Write `folder/NAME.md`: the origin of the table, and the table. Returns its text."""
    text = f"{head()}\n\n{table.rstrip()}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    return text


def head() -> str:
    """Return date, commit, machine and command of a table."""
    script = Path(sys.argv[0]).resolve()
    command = " ".join(["python", str(script.relative_to(ROOT)), *sys.argv[1:]])
    programs = f"{_llama()}{_peer()}"
    return f"{time.strftime('%Y-%m-%d')}, commit {_commit()}, {describe_machine()}; `{command}`; {programs}."


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    but_figures = ("--", ":/", ":!docs/figures")  # benchmarks write these files
    changed = git("status", "--porcelain", "-uno", *but_figures)
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + " with changes" * bool(changed)


def _llama() -> str:
    # imported late, because a benchmark of the chat's drawing does not need it
    from edgeinfer.runtime.llama import libllama

    info = libllama.build_info()
    variant = f"CPU variant {info.cpu_variant}, kernels {info.kernels or 'its own'}"
    return f"llama.cpp {info.llama_version} ({info.ggml_commit}), {variant}"


def _peer() -> str:
    """Return the name of the compared llama-server; "" if there is none."""
    program = peer_program("llama-server")
    if program is None:
        return ""
    package = Path(program).parents[1] / "version"  # written by scripts/fetch_llama_server.sh
    debian = f", Debian {package.read_text('utf-8').strip()}" if package.is_file() else ""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version: (.+)", done.stdout + done.stderr)
    return f"; llama-server {version[1] if version else 'of an unknown version'}{debian}"


def load_only(variant: str) -> None:
    """Make this process use one of ggml's CPU variants instead of the best."""
    from edgeinfer.runtime.llama import libllama

    name = f"libggml-cpu-{variant}.so"
    path = next(folder / name for folder in libllama.variant_dirs() if (folder / name).exists())
    folder = tempfile.mkdtemp()  # kept until exit: our kernels are chosen by the library's path
    atexit.register(shutil.rmtree, folder)
    shutil.copy(path, folder)
    libllama.variant_dirs = lambda: [Path(folder)]
    libllama.lib()
