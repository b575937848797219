"""Starting, draining, leaving when idle; systemd's sockets and notifications."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from edgeinfer.platform.process import activated_descriptors
from edgeinfer.runtime.fake import FakeEngine, Gate
from edgeinfer.server.guards import sockets
from edgeinfer.server.lifecycle import RunOptions
from edgeinfer.server.limits import Limits


def test_a_drain_finishes_what_runs_and_refuses_what_comes(serve, until):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([["one ", gate, "two"]]))
    with here.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"stream": True, "messages": [{"role": "user", "content": "x"}]},
    ) as answer:
        assert gate.reached.wait(20)
        with httpx2.Client(base_url=here.url) as other:
            assert other.get("/health").status_code == 200
        here.drain()
        until(lambda: here.endpoint.draining, "the drain to begin")
        health = f"{here.url}/health"  # by a new connection each time: those that are open are answered
        with pytest.raises(httpx2.TransportError):
            until(lambda: httpx2.get(health, timeout=20).status_code == 0, "the door to be closed", 20)
        gate.opened.set()
        text = "".join(answer.iter_text())
    assert "two" in text
    assert "[DONE]" in text
    ended = here.wait_ended()
    assert (ended.reason, ended.cut_short) == ("signal", False)


def test_a_request_on_a_kept_connection_is_refused_while_draining(serve, until):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([[gate, "x"]]))
    here.loop.call_soon_threadsafe(lambda: setattr(here.endpoint, "draining", True))
    until(lambda: here.endpoint.draining, "draining")
    refused = here.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert here.client.head("/infer?prompt=x").status_code == 503
    health = here.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    gate.opened.set()


@pytest.mark.parametrize("stream", [True, False])
def test_the_drains_limit_cuts_and_says_so(serve, stream):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([["one ", gate, "two"]]), limits=Limits(drain_s=0.1))
    asking = here.begin(gate, stream=stream)
    here.drain()
    reply = asking.result(30)
    assert here.wait_ended().cut_short
    assert "shutting down" in reply.text
    if not stream:
        assert reply.status_code == 503


def test_a_second_signal_ends_at_once(serve):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([["one ", gate, "two"]]), limits=Limits(drain_s=600))
    asking = here.begin(gate, stream=True)
    here.drain()
    here.drain()
    asking.result(30)
    assert here.wait_ended().reason == "signal"


def test_an_idle_endpoint_leaves_and_a_busy_one_does_not(serve, until):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([[gate, "x"]]), options=RunOptions(idle_exit_s=1.5))
    asking = here.begin(gate)
    until(
        lambda: time.monotonic() - here.endpoint.last_activity > 1.8,
        "longer than the idle time to pass",
    )
    assert not here.endpoint.draining
    gate.opened.set()
    asking.result()
    assert here.wait_ended().reason == "idle"


def test_the_service_manager_is_told(serve, tmp_path, monkeypatch, until):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        here = serve(FakeEngine())
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=serving fake at http://127.0.0.1:")
        here.drain()
        assert manager.recv(4096).startswith(b"STOPPING=1")
        here.wait_ended()


def test_notifying_nobody_or_a_dead_manager_is_harmless(monkeypatch, tmp_path):
    assert not sockets.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not sockets.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "relative")
    assert not sockets.notify("READY=1")


def test_an_abstract_notify_socket_is_understood(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0edgeinfer-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@edgeinfer-test-{os.getpid()}")
        assert sockets.notify("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_sockets_for_another_process_are_not_ours(monkeypatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert activated_descriptors() == []
    assert "LISTEN_FDS" not in os.environ


def _cli(*words: str, **spawn) -> subprocess.Popen[str]:
    code = "import sys; from edgeinfer.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **spawn,
    )


def _listening_url(process: subprocess.Popen[str], event: str = "ready") -> str:
    url = ""
    for line in process.stderr:
        said = json.loads(line)
        if said["event"] == "listening":
            url = said["url"]
        if said["event"] == event:
            return url
    pytest.fail("the endpoint did not come up")


@pytest.mark.model
def test_the_command_serves_and_ends_on_sigterm(smollm2):
    with _cli(
        "serve", str(smollm2), "--port", "0", "--threads", "1", "--ctx", "512", "--log", "json"
    ) as process:
        try:
            url = _listening_url(process)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""


def test_the_command_refuses_what_cannot_be():
    for words, status in (
        (["--port", "70000"], 2),
        (["--keep-alive", "-3"], 2),
        (["--idle-exit", "0"], 2),
    ):
        with _cli("serve", "x", *words) as process:
            assert process.wait(30) == status
            assert "error:" in process.stderr.read()
            process.stdout.read()
    with _cli("serve", "no-such-model") as process:
        assert process.wait(30) == 3
        process.stderr.read(), process.stdout.read()
