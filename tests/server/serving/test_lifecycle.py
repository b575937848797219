"""Start, drain, idle exit, and systemd's sockets and notifications."""

import io
import os
import socket
import sys
import time

import httpx2
import pytest
from fake_engine import FakeEngine, StepGate
from other_processes import run

from edgeinfer.cli.main import main
from edgeinfer.platform import listening
from edgeinfer.server import lifecycle
from edgeinfer.server.lifecycle import RunOptions
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_drain_finishes_running_requests_and_refuses_new_ones(serve, until, signal_name):
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, "two"]]))
    with live_server.stream() as answer:
        assert gate.reached.wait(60)
        with httpx2.Client(base_url=live_server.url, timeout=60) as other:
            assert other.get("/health").status_code == 200
        live_server.endpoint.log = Log("text", log := io.StringIO())
        live_server.drain(signal_name)
        until(lambda: live_server.endpoint.draining, "the drain to begin")
        # `httpx2.get` opens a new connection: on an open one, the endpoint would still answer
        health = f"{live_server.url}/health"
        with pytest.raises(httpx2.TransportError):
            until(lambda: httpx2.get(health, timeout=60).status_code == 0, "the door to be closed")
        gate.opened.set()
        text = "".join(answer.iter_text())
    assert "two" in text
    assert "[DONE]" in text
    outcome = live_server.wait_ended()
    assert (outcome.reason, outcome.cut_short) == ("signal", False)
    assert ("a second Ctrl-C ends at once" in log.getvalue()) == (signal_name == "SIGINT")


def test_a_request_on_a_kept_connection_is_refused_while_draining(serve, until):
    gate = StepGate()
    live_server = serve(FakeEngine([[gate, "x"]]))
    live_server.loop.call_soon_threadsafe(lambda: setattr(live_server.endpoint, "draining", True))
    until(lambda: live_server.endpoint.draining, "draining")
    refused = live_server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert live_server.client.head("/infer?prompt=x").status_code == 503
    health = live_server.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    gate.opened.set()


@pytest.mark.parametrize("stream", [True, False])
def test_drain_limit_cuts_off_answers_with_an_error(serve, stream):
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, "two"]]), limits=Limits(drain_s=0.1))
    asking = live_server.begin(gate, stream=stream)
    live_server.drain()
    reply = asking.result(60)
    assert live_server.wait_ended().cut_short
    assert "shutting down" in reply.text
    if not stream:
        assert reply.status_code == 503


def test_a_second_signal_ends_at_once(serve):
    gate = StepGate()
    live_server = serve(FakeEngine([["one ", gate, "two"]]), limits=Limits(drain_s=600))
    asking = live_server.begin(gate, stream=True)
    live_server.drain()
    live_server.drain()
    asking.result(60)
    assert live_server.wait_ended().reason == "signal"


def test_idle_endpoint_exits_and_busy_one_does_not(serve, until):
    gate = StepGate()
    live_server = serve(FakeEngine([[gate, "x"]]), options=RunOptions(idle_exit_s=300))
    endpoint, began_s = live_server.endpoint, time.monotonic()
    asking = live_server.begin(gate)
    endpoint.last_activity -= 600
    until(lambda: time.monotonic() - began_s > 1.2, "the next look at the time, which is each second")
    assert not endpoint.draining
    gate.opened.set()
    asking.result()
    until(lambda: not endpoint.in_flight, "the request to end")
    endpoint.last_activity -= 600
    assert live_server.wait_ended().reason == "idle"


def test_notifying_no_manager_or_a_dead_one_is_harmless(monkeypatch, tmp_path):
    assert not lifecycle.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not lifecycle.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "relative")
    assert not lifecycle.notify("READY=1")


def test_an_abstract_notify_socket_is_understood(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0edgeinfer-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@edgeinfer-test-{os.getpid()}")
        assert lifecycle.notify("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_endpoint_on_a_terminal_says_what_to_do_with_it(serve, until, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    live_server = serve()
    until(lambda: '"listening"' in live_server.log.getvalue(), "the endpoint to listen")
    assert (f"API: {live_server.url}/v1 · Ctrl+C" in capsys.readouterr().err) is is_terminal


def test_sockets_for_another_process_are_ignored(monkeypatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert listening.activated_sockets() == []
    assert "LISTEN_FDS" not in os.environ


#: Runs `serve` with a listening socket as descriptor 3, and a count that names more.
MISCOUNTED = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
os.dup2(listener.fileno(), 3)
os.closerange(4, 200)
os.environ.update(LISTEN_FDS=sys.argv.pop(), LISTEN_PID=str(os.getpid()))
from edgeinfer.launcher import main
sys.exit(main())
"""


@pytest.mark.parametrize("count", ["99", "2", "x", "1 2", "²", "9" * 5000])
def test_sockets_that_were_not_passed_are_an_error_in_words(count):
    done = run(sys.executable, "-c", MISCOUNTED, "serve", count, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert f"error: LISTEN_FDS={count[:20]}, but fewer descriptors from 3 on" in done.stderr


@pytest.mark.parametrize("options", [["--port", "70000"], ["--idle-exit", "0"]])
def test_options_out_of_range_are_refused(options, capfd):
    assert main(["serve", "x", *options]) == 2
    assert "error:" in capfd.readouterr().err
