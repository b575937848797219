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
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_serve import CONTEXT
from common import biggest_below, free_port, head, model_path, process, wait_healthy
from peer_server import EDGEINFER

LOAD = ("--ctx", str(CONTEXT), "--parallel", "8")
MODEL = model_path("smollm2")
COLUMNS = (
    "app_fds",
    "launcher_fds",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
)
GAUGES = re.compile(
    r"^edgeinfer_(num_requests_\w+|kv_cache_usage_ratio|http_requests_in_flight)\S* (\S+)$",
    re.MULTILINE,
)
#: Fields of every seventh request: streams, several answers, a whole one, a schema and a wrong field.
FIELDS: tuple[dict[str, object], ...] = (
    {"stream": True},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"stream": True},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"temperature": 9},
    {},
)


@contextlib.contextmanager
def warm_home() -> Iterator[dict[str, str]]:
    """Yield an environment whose home has MODEL as `one`, warmed. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as home:
        env = os.environ | {"EDGEINFER_HOME": home}
        pull = ["pull", str(MODEL), "--in-place", "--name", "one", "--quiet"]
        for verb in (pull, ["warm", "one", *LOAD]):
            subprocess.run([*EDGEINFER, *verb], env=env, check=True, capture_output=True)
        yield env


def body(number: int) -> bytes:
    messages = [{"role": "user", "content": f"Word {number}?"}]
    usual = {"messages": messages, "max_tokens": 2, "seed": number}
    return json.dumps(usual | FIELDS[number % len(FIELDS)]).encode()


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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            gauges = {name: float(value) for name, value in GAUGES.findall(reply.read().decode())}
        is_idle = not any(value for name, value in gauges.items() if name != "kv_cache_usage_ratio")
        if is_idle or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    app = biggest_below(launcher)
    rss = int(Path(f"/proc/{app}/statm").read_text().split()[1]) * 4096 / (1 << 20)
    pids = {"app_fds": app, "launcher_fds": launcher}
    fds = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
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
    serve = [*EDGEINFER, "serve", "one", "--port", str(port), "--log", "off", *LOAD, "--resume=always"]
    with warm_home() as env, process(serve, env=env) as served:
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
    waiting = ("num_requests_running", "num_requests_waiting", "http_requests_in_flight")
    is_unfinished = any(rows[-1][name] for name in waiting)
    has_more_fds = any(rows[-1][name] > rows[0][name] + 2 for name in ("app_fds", "launcher_fds"))
    if grown > 0.05 or is_unfinished or has_more_fds:
        raise SystemExit("something leaks")


if __name__ == "__main__":
    main()
