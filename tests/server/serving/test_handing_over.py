"""An endpoint that another process takes over: when it says that it is idle, and how it leaves."""

import os
import socket
import threading
import time

import httpx2
import pytest

from edgeinfer.launcher.handoff import COMMIT, START
from edgeinfer.runtime.fake import FakeEngine, Gate
from edgeinfer.server import lifecycle
from edgeinfer.snapshots.restore.app_host import AppHandoff


class Launcher:
    """Keeps what an app tells, and speaks on its pipe."""

    def __init__(self):
        self.told = []
        self._pipe = -1
        self.handoff = AppHandoff(self._tell, is_target=False)

    def _tell(self, message, fds):
        self.told.append(type(message).__name__)
        for fd in fds:
            self._pipe = os.dup(fd)

    def say(self, word):
        os.write(self._pipe, word)

    def close(self):
        if self._pipe >= 0:
            os.close(self._pipe)


@pytest.fixture
def launcher():
    one = Launcher()
    yield one
    one.close()


def test_idle_is_said_when_the_stream_has_ended(serve, until, launcher):
    gate = Gate(threading.Event())
    here = serve(FakeEngine([["one ", gate, "two"], ["three"]]), handoff=launcher.handoff)
    body = {"stream": True, "messages": [{"role": "user", "content": "x"}]}
    with here.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert gate.reached.wait(20)
        launcher.say(START)
        with httpx2.Client(base_url=here.url) as other:
            assert other.get("/health").status_code == 200
        assert launcher.told == ["HandoffSource"]
        gate.opened.set()
        assert "two" in "".join(answer.iter_text())
    until(
        lambda: launcher.told == ["HandoffSource", "SourceIdle"], "the endpoint to say that it is idle"
    )
    assert here.chat().status_code == 200


def test_another_model_is_waited_for_until_it_has_a_snapshot(serve, until, launcher, monkeypatch):
    monkeypatch.setattr(lifecycle, "_WARM_POLL_S", 0.0)
    here = serve(FakeEngine([["one"]] * 2), names=("fake", "other"), handoff=launcher.handoff)
    for model in ("fake", "other"):
        assert here.chat(model=model).status_code == 200
    asked = []
    warm: set[str] = set()

    def warm_models():
        asked.append(1)
        return frozenset(warm)

    here.endpoint.host.warm_models = warm_models
    launcher.say(START)
    until(lambda: len(asked) > 1, "the endpoint to look again")
    assert launcher.told == ["HandoffSource"]
    warm.add("other")
    until(
        lambda: launcher.told == ["HandoffSource", "SourceIdle"], "the endpoint to say that it is idle"
    )


def test_answers_that_somebody_may_come_back_for_keep_it(serve, until, launcher, monkeypatch):
    monkeypatch.setattr(lifecycle, "_WARM_POLL_S", 0.0)
    here = serve(FakeEngine([["one"]]), handoff=launcher.handoff, store_responses=True)
    name = here.client.post("/v1/responses", json={"input": "x"}).json()["id"]
    launcher.say(START)
    until(lambda: launcher.told == ["HandoffSource"], "the endpoint to take the offer")
    assert here.client.get(f"/v1/responses/{name}").status_code == 200
    assert launcher.told == ["HandoffSource"]
    assert here.client.delete(f"/v1/responses/{name}").status_code == 200
    until(
        lambda: launcher.told == ["HandoffSource", "SourceIdle"], "the endpoint to say that it is idle"
    )


def test_it_leaves_its_clients_an_answer_and_nobody_else(serve, until, launcher):
    here = serve(FakeEngine([["one"]] * 3), handoff=launcher.handoff)
    with httpx2.Client(base_url=here.url, timeout=30) as kept:
        assert "connection" not in kept.get("/health").headers
        launcher.say(COMMIT)
        until(lambda: here.endpoint.is_leaving, "the endpoint to leave")
        with socket.socket() as late, pytest.raises(ConnectionRefusedError):
            late.connect(("127.0.0.1", here.port))
        answer = kept.get("/health")
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert here.wait_ended().reason == "handed-off"


def test_a_client_that_is_accepted_in_the_moment_of_leaving_is_answered(serve, launcher):
    here = serve(FakeEngine([["one"]]), handoff=launcher.handoff)
    asleep = threading.Event()

    def sleep():
        asleep.set()
        time.sleep(0.5)

    here.loop.call_soon_threadsafe(sleep)
    assert asleep.wait(20)  # so one pass of the loop sees both, the launcher's word first
    launcher.say(COMMIT)
    with socket.create_connection(("127.0.0.1", here.port), timeout=30) as late:
        late.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert late.recv(1000).startswith(b"HTTP/1.1 200")
    assert here.wait_ended().reason == "handed-off"
