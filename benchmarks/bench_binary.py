"""The shipped file compared with the virtual environment: every stage of a warm launch from exec, the
first launch, and sizes.

    bench_binary.py [--binary dist/edgeinfer] [--models small,7b] [--runs 10] [--out bench-out]

Whole processes are timed from just before exec; sides alternate run by run, each with its own home and
snapshot. `ready`: /health of an endpoint answers 200. `painted`: a chat has drawn its screen on a
pseudo-terminal. `cold`: a start without a snapshot, with a prompt of one token. If this runs as root,
the programs run as an ordinary user (--uid). Medians and ranges go to bench-out/binary.md and .json.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import (  # noqa: E402  the folders this script is in
    describe,
    free_port,
    link_model,
    make_parser,
    process,
    summary,
    wait_healthy,
    write_figure,
)

from edgeinfer.bench import markdown  # noqa: E402
from edgeinfer.shipping.payload import open_shipped, read_index  # noqa: E402

STAGES = ("launcher", "restore", "running", "request")
#: Text of the empty composer, which shows that the chat has drawn its screen.
PAINTED = b"Ask something"


def cold_start(side: Side, model: str) -> dict[str, float]:
    """Time `run` without a snapshot, with a hot page cache: exec → loaded, → first token.

    The times are those that `run` itself reports.
    """
    arguments = ("run", model, "--raw", "Hello", "--temperature", "0", "--max-tokens", "1", "--json")
    result = json.loads(side.run(*arguments, "--resume", "never").stdout)["result"]
    ready_ms = result["start"]["stages_ms"]["ready"]
    first_ms = ready_ms + result["timings"]["ttft_ms"]
    return {"cold: ready": ready_ms, "cold: first token": first_ms}


class Side:
    """One way to start edgeinfer, with its own home."""

    def __init__(self, name: str, command: list[str], home: Path, uid: int) -> None:
        self.name = name
        self.command = command
        self.home = home
        home.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(home, uid, uid)
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "xterm-256color"}
        #: Arguments of subprocess for running as the ordinary user.
        self.settings: dict[str, Any] = {"env": environment | {"HOME": str(home)}, "cwd": "/"}
        if os.geteuid() == 0:
            self.settings |= {"user": uid, "group": uid, "extra_groups": []}

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        command = [*self.command, *arguments]
        done = subprocess.run(command, check=False, timeout=900, **streams, **self.settings)
        if check and done.returncode:
            raise SystemExit(f"{self.name}: {' '.join(arguments)}: {done.stdout} {done.stderr}")
        return done

    def answer(self, model: str) -> dict[str, float]:
        """Time `run`: the stages as it reports them, and the whole process by our clock."""
        began = time.monotonic()
        flags = ("--temperature", "0", "--max-tokens", "1", "--json")
        done = self.run("run", model, "Name three colours.", *flags)
        exit_ms = (time.monotonic() - began) * 1000
        result = json.loads(done.stdout)["result"]
        if result["start"]["how"] != "resumed":
            raise SystemExit(f"{self.name}: {model} was not resumed: {result['start']}")
        return {**{s: result["start"]["stages_ms"][s] for s in STAGES}, "answered and ended": exit_ms}

    def ready(self, model: str) -> dict[str, float]:
        """Time `serve`: exec → /health is 200."""
        port = free_port()
        began = time.monotonic()
        command = [*self.command, "serve", model, "--port", str(port), "--resume", "always"]
        with process(command, **self.settings) as serving:
            wait_healthy(port, serving)
            return {"serve: ready": (time.monotonic() - began) * 1000}

    def measure_chat(self, model: str) -> dict[str, float]:
        """Time `chat` on a pseudo-terminal: exec → the composer is on the screen."""
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        began = time.monotonic()
        chat = subprocess.Popen(
            [*self.command, "chat", model, "--resume", "always"],
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **streams,
            **self.settings,
        )
        os.close(terminal)
        seen = b""
        try:
            while PAINTED not in seen:
                if not select.select([controller], [], [], 60)[0]:
                    raise SystemExit(f"{self.name}: the chat drew nothing within 60 s: {seen[-200:]!r}")
                seen += os.read(controller, 1 << 16)
            return {"chat: painted": (time.monotonic() - began) * 1000}
        finally:
            chat.send_signal(signal.SIGTERM)
            with contextlib.suppress(OSError):  # EIO: the last process has closed the terminal
                while os.read(controller, 1 << 16):
                    pass
            chat.wait(60)
            os.close(controller)


def first_launches(side: Side, runs: int) -> dict[str, Any]:
    """Time `--version` of the shipped file in a new home, then in a used one."""
    times: dict[str, list[float]] = {"first": [], "later": []}
    for _ in range(runs):
        shutil.rmtree(side.home / ".local/share/edgeinfer/app", ignore_errors=True)
        for which in ("first", "later"):
            began = time.monotonic()
            side.run("--version")
            times[which].append((time.monotonic() - began) * 1000)
    return {which: summary(values) for which, values in times.items()}


def sizes(binary: Path) -> dict[str, int]:
    """Return the bytes in the file, by part, and unpacked, by folder."""
    shipped = open_shipped(binary)
    with binary.open("rb") as file:
        index = read_index(file, shipped)
    folders: dict[str, int] = {}
    for entry in index.files:
        parts = entry.path.split("/")
        name = "/".join(parts[:2]) if parts[0] == "_internal" and len(parts) > 2 else parts[0]
        folders[name] = folders.get(name, 0) + entry.size
    largest = dict(sorted(folders.items(), key=lambda item: -item[1])[:8])
    whole = binary.stat().st_size
    return {
        "the file": whole,
        "… first stage (bootloader)": shipped.payload_offset,
        "… application, compressed": shipped.payload_length,
        "… small Python of the first start": whole - shipped.archive_offset,
        "unpacked": index.size,
        **{f"… {name}": size for name, size in largest.items()},
    }


def make_sides(options: argparse.Namespace, work: Path) -> list[Side]:
    program = work / "edgeinfer"
    shutil.copy(options.binary, program)
    program.chmod(0o755)
    work.chmod(0o755)
    venv = str(Path(sys.executable).parent / "edgeinfer")
    return [
        Side("shipped file", [str(program)], work / "home-binary", options.uid),
        Side("virtual environment", [venv], work / "home-venv", options.uid),
    ]


def measure(
    name: str, both: list[Side], options: argparse.Namespace, work: Path
) -> dict[str, dict[str, Any]]:
    """Warm the model on both sides and launch it in turn."""
    path = link_model(name, work)
    runs: dict[str, dict[str, list[float]]] = {side.name: {} for side in both}
    for side in both:
        side.run("pull", str(path), "--name", name, "--in-place", "--quiet")
        side.run("warm", name)
        side.answer(name)
    for _ in range(options.runs):
        for side in both:
            measured = side.answer(name) | side.ready(name) | side.measure_chat(name)
            for stage, ms in (measured | cold_start(side, name)).items():
                runs[side.name].setdefault(stage, []).append(ms)
    for side in both:
        side.run("snapshots", "rm", name, check=False)
    path.unlink()
    return {
        side: {stage: summary(values) for stage, values in stages.items()}
        for side, stages in runs.items()
    }


def table(results: dict[str, Any]) -> str:
    """Return Markdown: launches, first launch, sizes."""
    columns = {
        f"{model}, {side}": stages
        for model, by_side in results["models"].items()
        for side, stages in by_side.items()
    }
    stages = next(iter(columns.values()), {})
    launches = [
        [stage, *(describe(column[stage], "ms") for column in columns.values())] for stage in stages
    ]
    firsts = [[f"{which} launch", describe(ms, "ms")] for which, ms in results["first_launch"].items()]
    sizes = [[part, f"{size / 1e6:.1f} MB"] for part, size in results["sizes"].items()]
    tables = {("from exec", *columns): launches, ("`edgeinfer --version`, shipped file", ""): firsts}
    tables["size", ""] = sizes
    return "\n\n".join(markdown(head, rows) for head, rows in tables.items()) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--binary", type=Path, default=HERE.parent / "dist/edgeinfer")
    parser.add_argument("--models", default="small,7b")
    parser.add_argument("--runs", type=int, default=10)
    uid = "user that runs the programs if this runs as root"
    parser.add_argument("--uid", type=int, default=1000, help=uid)
    work = "folder with space for models and snapshots, not on tmpfs"
    parser.add_argument("--work", default=None, help=work)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-binary-", dir=options.work) as folder:
        both = make_sides(options, Path(folder))
        results: dict[str, Any] = {"sizes": sizes(options.binary), "models": {}}
        results["first_launch"] = first_launches(both[0], min(5, options.runs))
        for name in filter(None, options.models.split(",")):
            results["models"][name] = measure(name, both, options, Path(folder))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "binary.json").write_text(json.dumps(results, indent=1))
        write_figure(options.out, "binary", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
