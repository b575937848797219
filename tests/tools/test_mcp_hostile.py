"""Servers that read nothing, answer nothing or send endlessly: every wait for them has a time limit.

A wait without a limit takes 600 s here, which is more than pytest allows a test.
"""

import contextlib
import gc
import itertools
import json
import threading
import time

import pytest
from http_tool_servers import HttpToolServer
from tools_here import command, tools_config

from edgeinfer.errors import ToolServerError
from edgeinfer.tools import mcp_client
from edgeinfer.tools.mcp_client import McpClient
from edgeinfer.tools.mcp_servers import ServerSpec
from edgeinfer.tools.mcp_transports import HttpTransport
from edgeinfer.tools.tool_use import Stop, StoppedError
from edgeinfer.tools.toolbox import Toolbox

pytestmark = pytest.mark.slow  # starts programs

#: More than a pipe's buffer holds.
LONG = {"text": "x" * 200_000}


def sse(handler, pieces, pause_s):
    handler.begin_reply("text/event-stream")
    handler.write_until_ended(pieces, pause_s)


def requests_of(method, n):
    for index in range(n):
        message = {"jsonrpc": "2.0", "id": f"r{index}", "method": method}
        yield b"data: " + json.dumps(message).encode() + b"\n\n"


def drip(handler, message):
    handler.begin_reply("application/json")
    handler.write_until_ended(itertools.repeat(b" "))


def drip_headers(handler, message):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    handler.write_until_ended(f"X-{i}: 1\r\n".encode() for i in itertools.count())


OVER_HTTP = {
    "comments": lambda handler, _: sse(handler, itertools.repeat(b": ping\n\n"), 0.1),
    "pings": lambda handler, _: sse(handler, requests_of("ping", 50_000), 0),
    "roots": lambda handler, _: sse(handler, requests_of("roots/list", 4000), 0),
    "silence": lambda handler, _: handler.server.ended.wait(),
    "drip": drip,
    "drip-headers": drip_headers,
}
OVER_STDIO = ("deaf", "slow", "pinging", "rooting", "garbage")


@pytest.fixture(params=[*OVER_STDIO, *OVER_HTTP])
def open_hostile(request, tmp_path):
    """`open_hostile()` starts a session with a hostile server."""
    kind = request.param
    with HttpToolServer(OVER_HTTP.get(kind)) as server, contextlib.ExitStack() as sessions:

        def open_session():
            way = {"url": server.url} if kind in OVER_HTTP else {"command": command(kind)}
            client = McpClient(ServerSpec(name=kind, **way), tmp_path, 600.0)
            sessions.callback(client.close)
            client.tools()
            return client

        yield open_session


def test_a_call_ends_with_its_time(open_hostile):
    client = open_hostile()
    client._timeout_s = 1.0  # the list of tools had more, on a busy machine
    n_threads = threading.active_count()
    with pytest.raises(ToolServerError, match="no answer within 1 s"):
        client.call("go", LONG)
    assert threading.active_count() < n_threads + 20, "the server's own requests take no threads"
    client.close()


def test_a_stop_ends_a_call(open_hostile):
    client, stop = open_hostile(), Stop()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    with pytest.raises(StoppedError):
        client.call("go", LONG, stop)
    timer.join()
    client.close()


def test_a_close_ends_a_call(open_hostile):
    client, has_ended = open_hostile(), threading.Event()

    def call():
        with pytest.raises((ToolServerError, StoppedError)):
            client.call("go", LONG)
        has_ended.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(0.3)
    client.close()
    assert has_ended.wait(60)


def test_close_while_a_message_is_being_handled_leaves_nothing_unawaited():
    is_handling, may_go_on = threading.Event(), threading.Event()

    def received(message):
        is_handling.set()
        may_go_on.wait(60)

    with HttpToolServer(None) as server:
        transport = HttpTransport(server.url, {}, received)
        transport.send({"jsonrpc": "2.0", "id": 1, "method": "ping"})
        assert is_handling.wait(60)
        transport.close()  # does not wait for `received`, which blocks the transport's thread
        may_go_on.set()
        transport._thread.join(60)
        assert not transport._thread.is_alive()
    gc.collect()  # pytest reports a coroutine that was never awaited


def test_a_server_that_read_nothing_is_started_anew(tmp_path):
    with Toolbox(tools_config("deaf", timeout_s=3), tmp_path) as toolbox:
        toolbox.prepare()
        for _ in range(2):
            with pytest.raises(ToolServerError, match="no answer within 3 s"):
                toolbox.start("deaf").call("go", LONG)


def test_a_start_ends_with_its_time_a_stop_or_a_close(tmp_path, monkeypatch):
    config = tools_config("mute", "plain")
    with Toolbox(config, tmp_path) as toolbox:
        stop = Stop()
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(StoppedError):
            toolbox.start("mute", stop)
        threading.Timer(0.5, toolbox.close).start()
        with pytest.raises(StoppedError):
            toolbox.start("mute")
    with Toolbox(config, tmp_path) as toolbox:
        toolbox.start("plain")
        monkeypatch.setattr(mcp_client, "_START_S", 1.0)
        toolbox.prepare()
        assert toolbox.notices == ["tool server mute: initialize: no answer within 1 s"]
        assert {tool.server for tool in toolbox.bound_tools().values()} == {"plain"}


def test_a_start_that_hangs_delays_no_other_server(tmp_path):
    with Toolbox(tools_config("mute", "plain"), tmp_path) as toolbox:

        def start():
            with pytest.raises(StoppedError):
                toolbox.start("mute")

        waiting = threading.Thread(target=start)
        waiting.start()
        toolbox.start("plain").call("weather", {"city": "Rome"})
        assert waiting.is_alive()
        toolbox.close()
        waiting.join(60)
        assert not waiting.is_alive()


def test_an_endless_list_is_cut_and_said(connect):
    client = connect("endless")
    assert len(client.tools()) == 64 * 10
    assert client.notices == ["tools of endless: too long or slow; some are missing"]


def test_progress_extends_a_call_up_to_a_limit(connect, monkeypatch):
    client = connect("progressing", timeout_s=2.0)
    assert client.call("go", {}, on_progress=lambda progress: None).text == "done"
    monkeypatch.setattr(mcp_client, "MAX_ANSWER_S", 2.0)
    with pytest.raises(ToolServerError, match="no answer"):
        client.call("go", {"forever": True}, on_progress=lambda progress: None)
