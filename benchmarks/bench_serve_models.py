"""Sections of bench_serve.py about models that come and go: starts, a catalogue in turn, workers, and a
killed application.

All need snapshots; where none can be made the section says so. They use a home of their own, which is
removed afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import biggest_below, free_port

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
def home_with(model: Path, names: list[str], load: Sequence[str] = LOAD) -> Iterator[dict[str, str]]:
    """An environment whose home has `model` under every name, warmed with these options. Raises
    CalledProcessError.
    """
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
            subprocess.run([*LAUNCHER, "warm", name, *load], env=env, check=True, capture_output=True)
        yield env
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def endpoint(
    env: dict[str, str], name: str, port: int, *more: str, load: Sequence[str] = LOAD
) -> Iterator[tuple[subprocess.Popen[str], list[dict[str, Any]]]]:
    """A served model and its log, which grows."""
    words = [*LAUNCHER, "serve", name, "--port", str(port), "--log", "json", *load, *more]
    log: list[dict[str, Any]] = []
    served = subprocess.Popen(
        words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )

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
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        reply, seconds = b"", 0.0
        while piece := client.recv(65_536):
            reply += piece
            if not seconds and re.search(rb'"content":"[^"]', reply):
                seconds = time.perf_counter() - begun
    assert seconds, reply
    return seconds


def start_section(model: Path, rounds: int = 7) -> dict[str, Any]:
    """exec → socket → listening → first streamed token of a client that connects at once, warm and
    cold.
    """
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
            report[how] = {
                "median_ms": statistics.median(tokens),
                "p95_ms": percentile(tokens, 95),
                "all_ms": tokens,
            }
    return report


def switch_section(model: Path, models: int = 10, rounds: int = 3) -> dict[str, Any]:
    """Every model of a catalogue in turn, each given back after its answer: every request is a
    resume.
    """
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


def stream_gaps(port: int, model: str, tokens: int) -> list[float]:
    """Milliseconds between the tokens of one stream."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": tokens,
    }
    raw = json.dumps(asked | {"temperature": 0, "ignore_eos": True, "stream": True}).encode()
    stamps: list[float] = []
    with connect(port) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        while piece := client.recv(65_536):
            stamps += [time.perf_counter()] * len(re.findall(rb'"content":"(?!")', piece))
    return [(b - a) * 1000 for a, b in itertools.pairwise(stamps)]


def worker_section(model: Path, rounds: int = 6, tokens: int = 64) -> dict[str, Any]:
    """Time between tokens of the model in the endpoint's own process and of its twin in a worker,
    alternating.
    """
    with home_with(model, ["own", "other"]) as env:
        port = free_port()
        gaps: dict[str, list[float]] = {"own": [], "other": []}
        with endpoint(env, "own", port):
            for name in gaps:
                stream_gaps(port, name, 8)
            for turn in range(rounds):
                for name in ("own", "other") if turn % 2 == 0 else ("other", "own"):
                    gaps[name] += stream_gaps(port, name, tokens)
    own, other = statistics.median(gaps["own"]), statistics.median(gaps["other"])
    return {
        "own_p50_ms": own,
        "worker_p50_ms": other,
        "added_ms": other - own,
        "tokens": len(gaps["own"]),
    }


def crash_section(model: Path, clients: int = 20, rounds: int = 5) -> dict[str, Any]:
    """`kill -9` of the application under streaming clients: refused connections, and the time to the
    next answer.
    """
    refused, answered = 0, []
    with home_with(model, ["one"]) as env:
        for _ in range(rounds):
            port = free_port()
            with endpoint(env, "one", port) as (served, _):
                first_token(port, "one")
                threads = [
                    threading.Thread(target=_stream_until_cut, args=(port,)) for _ in range(clients)
                ]
                for thread in threads:
                    thread.start()
                time.sleep(0.5)
                os.kill(biggest_below(served.pid), signal.SIGKILL)
                begun = time.perf_counter()
                try:
                    first_token(port, "one")
                    answered.append((time.perf_counter() - begun) * 1000)
                except ConnectionRefusedError:
                    refused += 1
                for thread in threads:
                    thread.join(60)
    return {
        "kills": rounds,
        "refused": refused,
        "next_answer_p50_ms": statistics.median(answered),
        "worst_ms": max(answered),
    }


def _stream_until_cut(port: int) -> None:
    with contextlib.suppress(OSError):
        stream_gaps(port, "one", 400)
