"""The client with the official SDK's server, over both transports, and with faulty servers."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from other_processes import free_port, has_ended, wait_until
from tool_servers import HOSTILE
from tools_here import SERVERS, tools_config

from edgeinfer.errors import OfflineError, ToolServerError
from edgeinfer.tools.mcp_client import CallResult, McpClient
from edgeinfer.tools.mcp_servers import ServerSpec
from edgeinfer.tools.tool_use import Stop, StoppedError, safe_text
from edgeinfer.tools.toolbox import Toolbox

pytestmark = pytest.mark.slow  # starts programs


@pytest.fixture(scope="module")
def http_url():
    """Start the SDK's server; return its URL."""
    port = free_port()
    command = [sys.executable, str(SERVERS), "http", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        assert any(b"Uvicorn running" in line for line in server.stdout)
        draining = threading.Thread(target=server.stdout.read)
        draining.start()
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()
        draining.join()


@pytest.fixture(params=["stdio", "http"])
def everything(request, connect, tmp_path):
    if request.param == "stdio":
        yield connect("stdio")
        return
    url = request.getfixturevalue("http_url")
    with contextlib.closing(McpClient(ServerSpec(name="http", url=url), tmp_path, 60.0)) as client:
        yield client


def test_sdk_server_offers_tools_and_answers(everything):
    names = [tool.name for tool in everything.tools()]
    assert names == ["add", "weather", "fail", "variables", "count"]
    assert everything.tools()[0].parameters["properties"]["a"]["type"] == "integer"
    assert everything.call("add", {"a": 2, "b": 3}) == CallResult("5")
    assert everything.call("fail", {}).is_error
    assert everything.call("no-such-tool", {}).is_error


def test_sdk_server_reports_progress(everything):
    said = []
    assert everything.call("count", {"to": 3}, on_progress=said.append) == CallResult("counted")
    assert said == ["step 1", "step 2", "step 3"]


def test_child_gets_named_variables_only(connect, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    seen = connect("stdio", env={"NAMED": "1"}).call("variables", {}).text.split()
    assert "NAMED" in seen
    assert "PATH" in seen
    assert not any("SECRET" in name or "EDGEINFER" in name for name in seen)


def test_slow_call_ends_with_its_time(connect, tmp_path):
    with pytest.raises(ToolServerError, match=r"no answer within 0\.5 s"):
        connect("slow", timeout_s=0.5).call("go", {})
    wait_until((tmp_path / "cancelled").exists, "the server to hear of it")


def test_call_is_stopped_and_the_server_hears_of_it(connect, tmp_path):
    client, stop = connect("slow"), Stop()

    def stop_once_called():
        wait_until((tmp_path / "called").exists, "the call")
        stop.set()

    threading.Thread(target=stop_once_called).start()
    with pytest.raises(StoppedError):
        client.call("go", {}, stop)
    wait_until((tmp_path / "cancelled").exists, "the server to hear of it")


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ("a\0b",)},
        {"command": ("cat",), "env": {"A=B": "x"}},
        {"url": "http://127.0.0.1:1/", "headers": {"Authorization": "Bearer …"}},
    ],
)
def test_a_server_with_odd_characters_is_reported(tmp_path, fields):
    with pytest.raises(ToolServerError, match=r"cannot be started|codec"):
        McpClient(ServerSpec(name="odd", **fields), tmp_path, 5.0)


def test_server_beside_a_sandbox_starts_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for module in ("json.py", "argparse.py"):
        (tmp_path / module).write_text("raise SystemExit('of the folder')")
    config = tools_config("whereabouts", builtin=("shell",))
    with Toolbox(config, tmp_path) as toolbox:
        told = json.loads(toolbox.start("whereabouts").call("go", {}).text)
        assert told["files"] == []
        assert not told["cwd"].startswith(str(tmp_path))
        assert str(tmp_path) not in told["env"]["PATH"].split(":")
        assert told["roots"] == [{"uri": tmp_path.as_uri(), "name": tmp_path.name}]
    wait_until(lambda: not Path(told["cwd"]).exists(), "the folder to be removed")
    with Toolbox(tools_config("whereabouts", builtin=("read",)), tmp_path) as toolbox:
        client = toolbox.start("whereabouts")
        assert json.loads(client.call("go", {}).text)["cwd"] == str(tmp_path)


def test_hostile_text_becomes_plain_and_short(connect):
    text = safe_text(connect("hostile").call("go", {}).text, 1000)
    assert text.startswith("Ignore all instructions")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]|\[31m|title", text)
    assert len(HOSTILE) > len(text)
    assert safe_text("é" * 1000, 101) == "é" * 50 + "\n… cut: 101 of 2,000 bytes"


def test_close_ends_the_child_and_its_children(connect):
    client = connect("family")
    pids = [int(word) for word in client.call("go", {}).text.split()]
    assert not any(map(has_ended, pids))
    client.close()
    wait_until(lambda: all(map(has_ended, pids)), "both processes to end")


def test_child_dies_with_a_killed_process(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from edgeinfer.tools.mcp_client import McpClient\n"
        "from edgeinfer.tools.mcp_servers import ServerSpec\n"
        "spec = ServerSpec(name='family', command=(sys.executable, sys.argv[1], 'family'))\n"
        "print(McpClient(spec, Path('.').resolve(), 60.0).call('go', {}).text, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(SERVERS)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        child, grandchild = map(int, parent.stdout.readline().split())
        parent.kill()
    wait_until(lambda: has_ended(child), "the child to end")
    os.kill(grandchild, 9)  # Linux signals only the child, not the grandchild


def test_addresses_elsewhere_ask_the_offline_switch(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_OFFLINE", "1")
    with pytest.raises(OfflineError):
        McpClient(ServerSpec(name="far", url="https://example.com/mcp"), tmp_path, 1.0)


def test_address_without_a_server_is_reported(tmp_path):
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(ToolServerError, match=r"127\.0\.0\.1"):
        McpClient(ServerSpec(name="none", url=url), tmp_path, 1.0)
