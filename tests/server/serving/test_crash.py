"""`kill -9` with twenty clients resets their streams; no connection is refused afterwards."""

import os
import signal
import socket
import subprocess
import sys
import threading

import httpx2
import pytest
from other_processes import LAUNCHER, engines_below, free_port

pytestmark = pytest.mark.model

BODY = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 400, "ignore_eos": True}


def _stream(port: int, said: threading.Semaphore, ends: list[str]) -> None:
    """Stream an answer until the connection is reset."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    try:
        with httpx2.stream("POST", url, json=BODY | {"stream": True}, timeout=120) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 3:
                    said.release()
    except httpx2.HTTPError as error:
        ends.append(type(error).__name__)


def test_a_killed_application_comes_back_on_the_same_socket(smollm2, until):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = f"--port {port} --threads 1 --ctx 16384 --parallel 20 --log off".split()
    command = [sys.executable, "-c", LAUNCHER, "serve", str(smollm2), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        refused: list[OSError] = []
        stop = threading.Event()
        try:
            until(lambda: _connects(port, []), "the socket")
            said, ends = threading.Semaphore(0), []
            clients = [threading.Thread(target=_stream, args=(port, said, ends)) for _ in range(20)]
            for client in clients:
                client.start()
            assert said.acquire(timeout=120), "no client got a token"
            metrics = f"{url}/metrics"
            until(lambda: "in_flight 20.0" in httpx2.get(metrics, timeout=120).text, "all in flight")
            knocking = threading.Thread(target=lambda: _knock(port, stop, refused))
            knocking.start()
            os.kill(engines_below(launcher.pid)[0], signal.SIGKILL)
            answer = httpx2.get(f"{url}/infer", params={"prompt": "hi", "max_tokens": 2}, timeout=120)
            assert answer.status_code == 200
            assert answer.json()["result"]
            stop.set()
            knocking.join()
            assert refused == []
            for client in clients:
                client.join(120)
            assert len(ends) == 20
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
