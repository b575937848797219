"""Two sections of bench_serve.py about models that come and go: exec to first token, and a catalogue visited in turn.

Both need snapshots; where none can be made the section says so. They use a home of their own, which is removed afterwards.
"""

from __future__ import annotations

import contextlib
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAUNCHER = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.launcher import main; sys.exit(main())",
]
LOAD = ["--ctx", "2048", "--parallel", "2"]


def percentile(values: list[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]


@contextlib.contextmanager
def home_with(model: Path, names: list[str]) -> Iterator[dict[str, str]]:
    """An environment whose home has `model` under every name, each warmed. Raises CalledProcessError with the reason."""
    home = tempfile.mkdtemp(prefix="edgeinfer-bench-", dir="/var/tmp")
    env = os.environ | {"EDGEINFER_HOME": home}
    try:
        for name in names:
            subprocess.run(
                [*LAUNCHER, "pull", str(model), "--in-place", "--name", name, "--quiet"],
                env=env,
                check=True,
                capture_output=True,
            )
            subprocess.run([*LAUNCHER, "warm", name, *LOAD], env=env, check=True, capture_output=True)
        yield env
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def endpoint(
    env: dict[str, str], name: str, port: int, *more: str
) -> Iterator[tuple[subprocess.Popen[str], list[dict[str, Any]]]]:
    """A served model and its log, which grows."""
    words = [*LAUNCHER, "serve", name, "--port", str(port), "--log", "json", *LOAD, *more]
    log: list[dict[str, Any]] = []
    served = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def read() -> None:
        for line in served.stderr or ():
            with contextlib.suppress(ValueError):
                log.append(json.loads(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield served, log
    finally:
        served.send_signal(signal.SIGTERM)
        served.wait(30)
        reader.join(5)


def connect(port: int, seconds: float = 60) -> socket.socket:
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 60)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)


def first_token(port: int, model: str, keep_alive: float | None = None) -> float:
    """Seconds from connecting to the first streamed token, which is then read to its end."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
    }
    raw = json.dumps(asked | ({} if keep_alive is None else {"keep_alive": keep_alive})).encode()
    begun = time.perf_counter()
    with connect(port) as client:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        reply, seconds = b"", 0.0
        while piece := client.recv(65_536):
            reply += piece
            if not seconds and re.search(rb'"content":"[^"]', reply):
                seconds = time.perf_counter() - begun
    assert seconds, reply
    return seconds


def start_section(model: Path, free_port: Any, rounds: int = 7) -> dict[str, Any]:
    """exec → socket → listening → first streamed token of a client that connects at once, warm and cold."""
    report: dict[str, Any] = {}
    with home_with(model, ["one"]) as env:
        for how, more in (("resumed", ["--resume", "always"]), ("cold", ["--resume", "never"])):
            tokens, starts = [], []
            for _ in range(rounds):
                port = free_port()
                begun = time.perf_counter()
                with endpoint(env, "one", port, *more) as (_, log):
                    connect(port).close()
                    bound = time.perf_counter() - begun
                    waited = first_token(port, "one")
                    tokens.append((bound + waited) * 1000)
                starts.append(next(line for line in log if line["event"] == "ready")["start"])
            assert set(starts) == {how}, starts
            report[how] = {"median_ms": statistics.median(tokens), "p95_ms": percentile(tokens, 95), "all_ms": tokens}
    return report


def switch_section(model: Path, free_port: Any, models: int = 10, rounds: int = 3) -> dict[str, Any]:
    """Every model of a catalogue in turn, each given back after its answer: every request is a resume."""
    names = [f"model-{number}" for number in range(models)]
    with home_with(model, names) as env:
        port = free_port()
        waits: list[float] = []
        with endpoint(env, names[0], port) as (_, log):
            first_token(port, names[0])
            for _ in range(rounds):
                waits += [first_token(port, name, keep_alive=0) * 1000 for name in names[1:]]
        loads = [line for line in log if line["event"] == "model-loaded" and line["where"] == "worker"]
    resumes = [line["seconds"] * 1000 for line in loads]
    return {
        "switches": len(waits),
        "resumed": sum(line["how"] == "resumed" for line in loads),
        "resume_p50_ms": statistics.median(resumes),
        "resume_p95_ms": percentile(resumes, 95),
        "first_token_p50_ms": statistics.median(waits),
        "first_token_p95_ms": percentile(waits, 95),
    }
