"""What an agent sends before anybody has spoken: it asks a socket that only listens."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.agents.running import find_program
from edgeinfer.agents.setups import Target
from edgeinfer.agents.table import Agent
from edgeinfer.errors import ServeError

QUESTION = "hi"
#: An agent that has sent nothing by then is waiting for somebody.
_FIRST_S = 90.0
#: Some ask for a title before they ask for anything else.
_MAIN_S = 10.0
#: The largest body that is read.
_MAX_BYTES = 32 << 20


class Captured(msgspec.Struct, frozen=True):
    """A request as the agent made it: the path without a query, and the body."""

    path: str
    body: dict[str, Any]

    @property
    def weight(self) -> tuple[bool, int]:
        """The main request has tools, if any has, and is the longest."""
        return bool(self.body.get("tools")), len(msgspec.json.encode(self.body))


def first_request(agent: Agent, target: Target) -> Captured:
    """The first request of a new session, in an empty folder. The agent is ended before it is answered.

    Raises UsageError when the agent is not here, ServeError when it asks nothing.
    """
    with (
        tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder,
        _listening(target.model) as (url, heard),
        _asking(agent, msgspec.structs.replace(target, url=url), Path(folder)) as process,
    ):
        found = _wait(heard, process, time.monotonic() + _FIRST_S)
        if not found:
            raise ServeError(
                f"{agent.title} asked nothing", hint=f"run `edgeinfer launch {agent.name}` once by hand"
            )
        until = time.monotonic() + _MAIN_S
        while not max(found, key=lambda one: one.weight).body.get("tools"):
            more = _wait(heard, process, until)
            if not more:
                break
            found += more
        return max(found, key=lambda one: one.weight)


def _wait(
    heard: queue.SimpleQueue[Captured], process: subprocess.Popen[bytes], until: float
) -> list[Captured]:
    while time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            return [heard.get(timeout=0.1)]
        if process.poll() is not None:
            break
    return []


@contextlib.contextmanager
def _asking(agent: Agent, target: Target, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The agent with one question, until the block ends; then it and all that it started are ended."""
    own = folder / "own"
    work = folder / "work"
    own.mkdir()
    work.mkdir()
    setup = agent.setup(target, own)
    process = subprocess.Popen(
        [find_program(agent), *setup.arguments, *agent.ask, QUESTION],
        cwd=work,
        env={**os.environ, **setup.environment, "PWD": str(work)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _listening(model: str) -> Iterator[tuple[str, queue.SimpleQueue[Captured]]]:
    """A socket that hears requests and answers none, until the block ends."""
    heard: queue.SimpleQueue[Captured] = queue.SimpleQueue()
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            card = {"id": model, "object": "model"}
            self._reply({"object": "list", "data": [card]})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            length = min(int(self.headers.get("content-length") or 0), _MAX_BYTES)
            with contextlib.suppress(ValueError):
                body = json.loads(self.rfile.read(length))
                if isinstance(body, dict):
                    heard.put(Captured(self.path.partition("?")[0], body))
            over.wait()
            self.close_connection = True

        def _reply(self, value: Any) -> None:
            raw = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
