"""What clients are told when the process that answers them is gone: by whoever kept copies of their
connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from dataclasses import dataclass, field

import pytest

from edgeinfer.runtime.fake import FakeEngine, Gate
from edgeinfer.server.guards import crash_replies
from edgeinfer.server.guards.crash_replies import SILENT, stream_state, waiting_state
from edgeinfer.server.operations import DIALECTS
from edgeinfer.snapshots.launching.kept_connections import Copies, Kept

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the launcher keeps copies on Linux"
)
#: The states of each dialect's connections, by the dialect's name.
WAITING = {dialect.name: waiting_state(place) for place, dialect in enumerate(DIALECTS)}
STREAM = {dialect.name: stream_state(place) for place, dialect in enumerate(DIALECTS)}
OLLAMAS = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.fixture
def ends():
    """The app's end and the launcher's. A test ends the latter with `say`."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    states_fd = os.memfd_create("states")
    with here:
        yield (
            Copies(here, states_fd),
            Kept([there.detach(), os.dup(states_fd)], crash_replies.replies(DIALECTS)),
        )
    os.close(states_fd)


@dataclass
class Noted:
    """Stands in for the copies: what is held, and what was noted."""

    held: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    ever: int = 0

    def hold(self, number: int) -> None:
        self.held.append(number)
        self.ever += 1

    def mark(self, number: int, state: int) -> None:
        if self.states[-1:] != [state]:
            self.states.append(state)

    def drop(self, number: int) -> None:
        self.held.remove(number)


def rest(client: socket.socket) -> bytes:
    """Everything until the other side closes."""
    client.settimeout(10)
    return b"".join(iter(lambda: client.recv(65_536), b""))


@pytest.mark.parametrize("state", range(1 + 2 * len(DIALECTS)))
def test_a_connection_gets_the_reply_of_its_state_and_is_closed(ends, state):
    copies, kept = ends
    client, ours = socket.socketpair()
    with client:
        copies.hold(ours.fileno())
        copies.mark(ours.fileno(), STREAM["openai"])
        copies.mark(ours.fileno(), state)
        ours.close()
        kept.send_replies()
        assert rest(client) == crash_replies.replies(DIALECTS)[state]


def test_the_replies_are_whole_answers_and_whole_ends_of_streams():
    said = crash_replies.replies(DIALECTS)
    for state in WAITING.values():
        head, _, body = said[state].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
        assert {b"retry-after: 1", b"connection: close", b"content-length: %d" % len(body)} <= set(
            lines
        )
        assert "ask again" in str(json.loads(body)["error"])
    for state in STREAM.values():
        size, _, chunks = said[state].partition(b"\r\n")
        events = chunks[: int(size, 16)]
        assert chunks[len(events) :] == b"\r\n0\r\n\r\n"
        assert b"ask again" in events


def test_a_dropped_connection_is_closed_and_hears_nothing(ends):
    copies, kept = ends
    client, ours = socket.socketpair()
    with client:
        copies.mark(ours.fileno(), WAITING["openai"])
        copies.hold(ours.fileno())
        copies.drop(ours.fileno())
        ours.close()
        assert kept.receive()
        assert rest(client) == b""
    kept.send_replies()


def test_a_number_is_used_again(ends):
    copies, kept = ends
    first, ours = socket.socketpair()
    second, other = socket.socketpair()
    with first, second, other:
        copies.hold(ours.fileno())
        number = ours.fileno()
        os.dup2(other.fileno(), number)  # as if closed and another accepted, and the drop was lost
        copies.hold(number)
        copies.mark(number, WAITING["openai"])
        ours.close()
        kept.send_replies()
        assert rest(first) == b""
        assert rest(second).startswith(b"HTTP/1.1 503")


def test_a_client_that_does_not_read_holds_nobody_up(ends):
    copies, kept = ends
    client, ours = socket.socketpair()
    with client:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while ours.send(b"x" * 65_536):
                pass
        copies.mark(ours.fileno(), STREAM["openai"])
        copies.hold(ours.fileno())
        ours.close()
        kept.send_replies()
        assert set(rest(client)) == {ord("x")}


def test_the_end_of_the_app_is_heard(ends):
    copies, kept = ends
    copies._channel.shutdown(socket.SHUT_RDWR)
    assert not kept.receive()
    copies.drop(5)  # and on this side it is no error
    kept.send_replies()


@pytest.mark.parametrize(
    ("path", "body", "states"),
    [
        ("/v1/chat/completions", ASKED, [WAITING["openai"]]),
        ("/v1/chat/completions", ASKED | {"stream": True}, [WAITING["openai"], STREAM["openai"]]),
        ("/v1/messages", ASKED, [WAITING["anthropic"]]),
        ("/v1/messages", ASKED | {"stream": True}, [WAITING["anthropic"], STREAM["anthropic"]]),
        ("/v1/responses", {"input": "hi", "stream": True}, [WAITING["responses"], STREAM["responses"]]),
        ("/v1/chat/completions", {"messages": 5}, [WAITING["openai"]]),
        ("/api/chat", OLLAMAS, [WAITING["ollama"], STREAM["ollama"]]),
        ("/api/chat", OLLAMAS | {"stream": False}, [WAITING["ollama"]]),
    ],
)
def test_requests_are_noted_as_they_go(serve, path, body, states):
    noted = Noted()
    here = serve(FakeEngine([("One", " two")]), copies=noted)
    with here.client.stream("POST", path, json=body) as answer:
        answer.read()
        assert noted.states == [*states, SILENT]
        assert len(noted.held) == 1


def test_a_connection_is_held_once_and_only_when_it_asked_for_a_model(serve, until):
    noted = Noted()
    here = serve(FakeEngine(), copies=noted)
    assert here.client.get("/health").status_code == 200
    assert noted.ever == 0
    assert [here.chat().status_code for _ in range(3)] == [200, 200, 200]
    assert noted.ever == 1
    here.client.close()
    until(lambda: not noted.held, "the copy to be dropped")


def test_a_client_sees_the_end_though_a_copy_is_open(serve, until):
    gate = Gate(threading.Event())
    noted = Noted()
    kept: list[int] = []
    noted.hold = lambda number: kept.append(os.dup(number))  # type: ignore[method-assign]
    noted.drop = lambda number: None  # type: ignore[method-assign]
    here = serve(FakeEngine([("One",), ("One", gate)]), copies=noted)
    assert (
        here.client.post(
            "/v1/chat/completions", json=ASKED, headers={"connection": "close"}
        ).status_code
        == 200
    )
    raw = json.dumps(ASKED).encode()
    with socket.create_connection(("127.0.0.1", here.port)) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: len(kept) == 2, "the second copy")
        gate.opened.set()
        assert rest(client).startswith(b"HTTP/1.1 200")
    for number in kept:
        os.close(number)
