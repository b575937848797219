"""`serve` that started cold goes on in a resumed process, and no client notices. Real snapshots, real
clients; an ordinary user and root.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading

import pytest
from other_processes import descendants, has_ended, private_bytes, wait_until

from edgeinfer.config.config_file import Config, SnapshotsConfig
from edgeinfer.host import Start
from edgeinfer.snapshots import format
from edgeinfer.snapshots.restore.app_host import AppHost

from ..conftest import Person
from ..test_by_itself import MODEL, Endpoint

pytestmark = pytest.mark.criu

IDLE_BYTES = 60_000_000
SETTINGS = "[snapshots]\nidle-release-s = 1.0\n"


@pytest.fixture
def cold(anybody, tmp_path_factory):
    """The same person with a home of its own, where no snapshot is yet."""
    home = anybody.place.folder / tmp_path_factory.mktemp("cold").name
    home = home.with_name(f"{home.name}-{anybody.uid}")
    person = Person(anybody.place, anybody.uid, anybody.gid, home, anybody.model)
    person.settings(SETTINGS)
    return person


class Caller:
    """A client that asks again and again, on a connection of its own each time or always on one."""

    def __init__(self, endpoint: Endpoint, *, kept: bool) -> None:
        self._port = endpoint.port
        self._kept = kept
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.failures: list[str] = []
        self.texts: set[str] = set()
        self.closes = 0
        self.answers = 0

    def _run(self) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.wait(0.2):  # there are moments without a request, on a busy machine too
            try:
                self._ask(link)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failures.append(repr(error))
            if not self._kept:
                link.close()
        link.close()

    def _ask(self, link: http.client.HTTPConnection) -> None:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "temperature": 0}
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = link.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        self.texts.add(json.loads(content)["choices"][0]["text"])
        self.closes += answer.headers.get("connection") == "close"
        self.answers += 1

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


def starts(endpoint: Endpoint) -> list[str]:
    """List how this endpoint's processes started, in the order of their readiness."""
    lines = [line for line in endpoint.log.read_text().splitlines() if line.startswith("{")]
    entries = [json.loads(line) for line in lines]
    return [entry["start"] for entry in entries if entry.get("event") == "ready"]


def private(endpoint: Endpoint) -> int:
    tree = [endpoint.process.pid, *descendants(endpoint.process.pid)]
    return sum(private_bytes(pid) for pid in tree)


@contextlib.contextmanager
def stream(endpoint: Endpoint):
    """Begin a long answer as server-sent events; yields what ends it."""
    link = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=120)
    body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 4000, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data:")

    def hang_up() -> None:
        answer.close()
        link.close()

    try:
        yield hang_up
    finally:
        hang_up()


def test_endpoint_handoff_loses_no_request(cold):
    with Endpoint(cold, MODEL) as endpoint:
        text = endpoint.ask()["choices"][0]["text"]
        first = endpoint.apps()[0]
        before = private(endpoint)
        wait_until(lambda: list(cold.snapshots.glob("*")), "no build began")
        with stream(endpoint) as hang_up, Caller(endpoint, kept=True) as kept:
            cold.logged("built in")
            wait_until(lambda: kept.answers > 5, "the client was not answered")
            assert starts(endpoint) == ["cold"]  # the stream goes on, so does its process
            with Caller(endpoint, kept=False) as fresh:
                hang_up()
                wait_until(lambda: starts(endpoint) == ["cold", "resumed"], "nothing was handed over")
                wait_until(lambda: has_ended(first), "the first process never ended")
                before_end = fresh.answers
                wait_until(lambda: fresh.answers > before_end + 3, "the client was not answered")
        assert (kept.failures, fresh.failures) == ([], [])
        assert kept.texts | fresh.texts == {text}
        assert kept.closes >= 1  # told to come again, instead of cut off
        wait_until(lambda: private(endpoint) <= IDLE_BYTES, f"{private(endpoint)} bytes of its own")
        print(
            f"private memory of the tree: {before / 1e6:.0f} MB, then {private(endpoint) / 1e6:.0f} MB"
        )
        assert endpoint.ask()["choices"][0]["text"] == text
    assert endpoint.process.returncode == 0


def test_endpoint_handoff_aborts_if_target_does_not_start(cold):
    with Endpoint(cold, MODEL) as endpoint:
        text = endpoint.ask()["choices"][0]["text"]
        apps = endpoint.apps()
        wait_until(lambda: list(cold.snapshots.glob("*")), "no build began")
        with stream(endpoint) as hang_up, Caller(endpoint, kept=True) as kept:
            cold.logged("built in")
            for image in (cold.snapshot() / format.IMAGES).glob("core-*.img"):
                with image.open("r+b") as file:  # in place: the launcher may look at its size right now
                    file.write(bytes(image.stat().st_size))
            hang_up()
            wait_until(lambda: "no handoff" in endpoint.log.read_text(), "it was not tried")
            answers = kept.answers
            wait_until(lambda: kept.answers > answers + 3, "the client was not answered")
        assert (kept.failures, kept.texts, kept.closes) == ([], {text}, 0)
        assert endpoint.apps() == apps
        assert starts(endpoint) == ["cold"]


def test_handoff_is_off_by_config_and_for_resumed_processes():
    link, theirs = socket.socketpair()
    with link, theirs:
        for how, wanted in (("cold", False), ("resumed", True)):
            host = AppHost(Start(how=how), link, None)
            host._config = Config(snapshots=SnapshotsConfig(hand_over=wanted))
            assert host.handoff() is None
        host = AppHost(Start(how="cold"), link, None)
        host._config = Config()
        assert not host.handoff().is_target
