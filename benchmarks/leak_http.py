"""Ten thousand requests to the real model, a tenth of them abandoned: what grows?

    python benchmarks/leak_http.py [--requests 10000] [--clients 8]

The endpoint is resumed from a snapshot, with its launcher. Every thousand requests this prints:
resident memory, open descriptors of the application and of the launcher, running and waiting
generations, and the used KV cache. It fails if memory grows by more than 5 % after the first two
thousand, or if anything else remains.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_serve import CONTEXT, wait_healthy
from common import biggest_below, free_port, head, model_path

LAUNCHER = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.launcher import main; sys.exit(main())",
]
LOAD = ["--ctx", "2048", "--parallel", "2"]
MODEL = model_path("smollm2")
PARALLEL = 8

COLUMNS = (
    "app_fds",
    "launcher_fds",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
)


@contextlib.contextmanager
def home_with(model: Path, names: list[str], load: Sequence[str] = LOAD) -> Iterator[dict[str, str]]:
    """Yield an environment whose home has `model` under every name, warmed with these options. Raises
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
    """Yield a served model and its log, which grows."""
    command = [*LAUNCHER, "serve", name, "--port", str(port), "--log", "json", *load, *more]
    log: list[dict[str, Any]] = []
    served = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
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


def body(number: int) -> bytes:
    """Make a request: streams, whole answers, several answers, schemas and wrong fields in turn."""
    asked: dict[str, object] = {
        "messages": [{"role": "user", "content": f"Word {number}?"}],
        "max_tokens": 2,
        "seed": number,
    }
    kind = number % 7
    if kind in (0, 3):
        asked["stream"] = True
    elif kind == 1:
        asked |= {"n": 2}
    elif kind == 2:
        asked |= {"logprobs": True, "top_logprobs": 2}
    elif kind == 4:
        asked |= {"structured_outputs": {"choice": ["yes", "no"]}}
    elif kind == 5:
        asked |= {"temperature": 9}
    return json.dumps(asked).encode()


async def send(port: int, number: int) -> None:
    """Send a request; every tenth client leaves without reading."""
    raw = body(number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    with contextlib.suppress(ConnectionError):
        if number % 10 == 9:
            await writer.drain()
        else:
            reply = await reader.read()
            assert re.match(rb"HTTP/1.1 (200|400) ", reply), reply[:200]
    writer.close()


async def some(port: int, numbers: range, clients: int) -> None:
    numbers_left = iter(numbers)

    async def client() -> None:
        for number in numbers_left:
            await send(port, number)

    await asyncio.gather(*(client() for _ in range(clients)))


def settle(port: int, launcher: int) -> dict[str, float]:
    """Return the figures as soon as nothing runs any more."""
    deadline = time.monotonic() + 30
    while True:
        text = subprocess.run(
            ["curl", "-s", f"http://127.0.0.1:{port}/metrics"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        gauges = {
            m[1]: float(m[2])
            for m in re.finditer(
                r"^edgeinfer_(num_requests_\w+|kv_cache_usage_ratio|http_requests_in_flight)\S* (\S+)$",
                text,
                re.M,
            )
        }
        if (
            not any(v for k, v in gauges.items() if k != "kv_cache_usage_ratio")
            or time.monotonic() > deadline
        ):
            break
        time.sleep(0.05)
    app = biggest_below(launcher)
    rss = int(Path(f"/proc/{app}/statm").read_text().split()[1]) * 4096 / (1 << 20)
    fds = {
        f"{name}_fds": len(os.listdir(f"/proc/{pid}/fd"))
        for name, pid in (("app", app), ("launcher", launcher))
    }
    return {"rss_mib": rss} | fds | gauges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    port = free_port()
    rows = []
    print(f"{head()}\n\n{MODEL.name}, {options.clients} clients\n")
    print(f"| requests | seconds | RSS MiB | {' | '.join(COLUMNS)} |\n{'|---' * (3 + len(COLUMNS))}|")
    load = ("--ctx", str(CONTEXT), "--parallel", str(PARALLEL))
    with (
        home_with(MODEL, ["one"], load) as env,
        endpoint(env, "one", port, "--resume", "always", load=load) as (served, _),
    ):
        wait_healthy(port, served)
        began = time.monotonic()
        for begin in range(0, options.requests, 1000):
            asyncio.run(some(port, range(begin, min(begin + 1000, options.requests)), options.clients))
            row = settle(port, served.pid)
            rows.append(row)
            said = [begin + 1000, f"{time.monotonic() - began:.0f}", f"{row['rss_mib']:.1f}"]
            said += [f"{row[name]:.3g}" for name in COLUMNS]
            print("| " + " | ".join(map(str, said)) + " |", flush=True)
    grown = rows[-1]["rss_mib"] / rows[min(1, len(rows) - 1)]["rss_mib"] - 1
    print(f"\nmemory after the first two thousand: {grown:+.1%}")
    unfinished = (
        rows[-1]["num_requests_running"]
        + rows[-1]["num_requests_waiting"]
        + rows[-1]["http_requests_in_flight"]
    )
    if (
        grown > 0.05
        or unfinished
        or any(rows[-1][name] > rows[0][name] + 2 for name in ("app_fds", "launcher_fds"))
    ):
        raise SystemExit("something leaks")


if __name__ == "__main__":
    main()
