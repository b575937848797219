"""`kill -9` of the application under twenty streaming clients: the socket survives, nobody is refused, the next is answered."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

pytestmark = [pytest.mark.model, pytest.mark.skipif(sys.platform != "linux", reason="the launcher holds sockets on Linux")]

LAUNCHER = "import sys; sys.argv[0] = 'edgeinfer'; from edgeinfer.launcher import main; sys.exit(main())"
BODY = json.dumps({"messages": [{"role": "user", "content": "Count."}], "max_tokens": 400, "ignore_eos": True, "stream": True})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _below(pid: int) -> list[int]:
    """Descendants of a process, deepest last."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_below(int(child))]
    return found


def _app(launcher: int) -> int:
    """The descendant that holds the model: the one with the most memory."""
    sizes = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _below(launcher)}
    return max(sizes, key=lambda pid: sizes[pid])


def _stream(port: int, said: threading.Semaphore, ends: list[str]) -> None:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    try:
        with httpx2.stream("POST", url, content=BODY, headers={"content-type": "application/json"}, timeout=120) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 3:
                    said.release()
        ends.append("whole")
    except httpx2.TransportError:
        ends.append("cut")
        said.release()


def test_a_killed_application_comes_back_on_the_same_socket(smollm2, until):
    port = _free_port()
    words = ["serve", str(smollm2), "--port", str(port), "--threads", "1", "--ctx", "16384", "--parallel", "20", "--log", "off"]
    command = [sys.executable, "-c", LAUNCHER, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        refused: list[OSError] = []
        stop = threading.Event()
        clients: list[threading.Thread] = []
        try:
            until(lambda: _connects(port, []), "the socket", 60)
            said, ends = threading.Semaphore(0), []
            clients = [threading.Thread(target=_stream, args=(port, said, ends)) for _ in range(20)]
            for client in clients:
                client.start()
            assert said.acquire(timeout=120), "no client got a token"
            knocking = threading.Thread(target=lambda: _knock(port, stop, refused))
            knocking.start()
            os.kill(_app(launcher.pid), signal.SIGKILL)
            answer = httpx2.get(f"http://127.0.0.1:{port}/infer", params={"prompt": "hi", "max_tokens": 2}, timeout=120)
            assert answer.status_code == 200
            assert answer.json()["result"]
            stop.set()
            knocking.join()
            assert refused == []
            for client in clients:
                client.join(120)
            assert "cut" in ends
        finally:
            stop.set()
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(60)


def _connects(port: int, refused: list[OSError]) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError as error:
        refused.append(error)
        return False
    return True


def _knock(port: int, stop: threading.Event, refused: list[OSError]) -> None:
    while not stop.is_set() and not refused:
        _connects(port, refused)
        stop.wait(0.01)
