"""Tokens that the decode thread writes arrive complete and in order, on no other connection."""

import asyncio
import socket

import pytest
from fake_engine import FakeEngine, StepGate
from least_requests import STREAMING, objects_of, text_of

from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta, Timings, ToolCallDelta, Usage
from edgeinfer.server.connection import Connection

END = Finished(reason="stop", usage=Usage(), timings=Timings())


async def connect():
    """Return a connection of an endpoint, and the client's socket."""
    server_end, client = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=server_end)
    return Connection(transport), transport, client


def words(event):
    return event.text.encode()


async def test_tokens_are_written_on_the_thread_that_made_them():
    connection, transport, client = await connect()
    with client:
        direct_writer = connection.open_direct_writer(words)
        assert await asyncio.to_thread(direct_writer, TextDelta("one"))
        assert await asyncio.to_thread(direct_writer, ReasoningDelta("two"))
        assert client.recv(100) == b"3\r\none\r\n3\r\ntwo\r\n"
        assert not direct_writer(ToolCallDelta(0))
        connection.stop_direct_writes()
        assert not direct_writer(TextDelta("late"))
        transport.abort()


async def test_connection_of_a_client_that_left_is_cut():
    """asyncio does not read a half-closed connection: only a write shows that the client is gone."""
    connection, transport, client = await connect()
    transport.pause_reading()
    client.close()
    direct_writer = connection.open_direct_writer(words)
    assert await asyncio.to_thread(direct_writer, TextDelta("x"))
    await asyncio.sleep(0)
    assert transport.is_closing()
    assert not direct_writer(TextDelta("y"))


async def test_a_client_that_left_and_a_defect_do_no_harm():
    connection, transport, client = await connect()
    client.close()
    assert connection.open_direct_writer(words)(TextDelta("x"))
    assert not connection.open_direct_writer(lambda event: 1 // 0)(TextDelta("x"))
    transport.abort()


@pytest.mark.parametrize("path", STREAMING)
def test_a_stream_past_the_event_loop_says_the_same(serve, path):
    gate = StepGate()
    script = ("One", gate, *(f" {number}" for number in range(200)))
    live_server = serve(FakeEngine([script, script]))
    limit = {} if path == "/v1/responses" else {"max_tokens": 300}
    body, texts = STREAMING[path] | limit | {"stream": True}, []
    for _ in range(2):  # the second request uses the same connection
        text = ""
        with live_server.client.stream("POST", path, json=body) as answer:
            for event in objects_of(answer.iter_lines()):
                text += text_of(event)
                gate.opened.set()
        texts.append(text)
    assert texts == ["One" + "".join(f" {number}" for number in range(200))] * 2


def test_a_slow_reader_gets_everything_in_order(serve, until):
    """The socket's buffer fills up, and the direct writer closes in the middle of a token."""
    gate = StepGate()
    engine = FakeEngine([("One", gate, *(f"{number:05d}" * 4000 for number in range(800)))])
    live_server = serve(engine)
    with live_server.stream() as answer:
        lines = answer.iter_lines()
        assert '"One"' in next(line for line in lines if "One" in line)
        assert gate.reached.wait(60)
        gate.opened.set()
        until(lambda: engine.metrics().running == 0, "the whole answer to be made")
        text = "".join(map(text_of, objects_of(lines)))
    assert text == "".join(f"{number:05d}" * 4000 for number in range(800))
