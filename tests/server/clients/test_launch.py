"""`edgeinfer launch` gives an agent (a script) an endpoint with a large enough context."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from made_models import make_llama
from msgspec.structs import replace
from other_processes import has_ended, wait_until

from edgeinfer.agents import endpoint
from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.agents.known_agents import AGENTS, AgentTarget, agent_of
from edgeinfer.cli.main import main
from edgeinfer.errors import ServeError

#: A fake aider: it writes its settings to a file, lists the endpoint's models, and exits with 7.
AGENT = """#!{python}
import json, os, pathlib, sys, urllib.request
base = os.environ["AIDER_OPENAI_API_BASE"]
models = json.load(urllib.request.urlopen(base + "/models"))["data"]
sizes = json.load(open(os.environ["AIDER_MODEL_METADATA_FILE"]))
said = dict(argv=sys.argv[1:], model=os.environ["AIDER_MODEL"], sizes=sizes, ids=[m["id"] for m in models])
pathlib.Path({out!r}).write_text(json.dumps(said | dict(file=os.environ["AIDER_MODEL_METADATA_FILE"])))
sys.exit(7)
"""


@pytest.fixture
def aider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script `aider` on PATH; return the file that it writes."""
    out = tmp_path / "said.json"
    program = tmp_path / "bin/aider"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable, out=str(out)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return out


@pytest.fixture
def configure_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return `configure(port)`, which writes a configuration with the port of `serve`."""

    def configure(port: int) -> None:
        path = tmp_path / "config.toml"
        path.write_text(f"[serve]\nport = {port}\n[snapshots]\nauto-warm = false\n")
        monkeypatch.setenv("EDGEINFER_CONFIG", str(path))

    return configure


def test_agent_gets_the_endpoint_and_its_model(serve, aider, configure_port, capfd):
    recalled: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Recalling(FakeEngine):
        def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
            recalled.put(agent)
            return []

    live_server = serve(Recalling(info=replace(DEFAULT_INFO, n_ctx=32768)))
    configure_port(live_server.port)
    assert main(["launch", "aider", "--message", "hi", "--json", "--help"]) == 7
    assert recalled.get(timeout=60) == "aider"
    said = json.loads(aider.read_text())
    assert said["argv"] == ["--message", "hi", "--json", "--help"]
    assert (said["model"], said["ids"]) == ("openai/fake", ["fake"])
    assert said["sizes"]["openai/fake"]["max_input_tokens"] == 32768
    assert not Path(said["file"]).exists()
    assert f"aider asks fake at {live_server.url}" in capfd.readouterr().err


def test_foreign_listener_is_sent_nothing(stranger):
    with stranger():
        listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert endpoint.probe(url, "secret-key-0123456789") is None
        with pytest.raises(ServeError, match="another user"):
            RemoteEndpoint(url=url, model="m", key="secret-key-0123456789").request("GET", "/props")
        with pytest.raises(ServeError, match="another user"):
            RemoteEndpoint(url=url, model="m").has("/web")
        for _ in range(3):
            client, _ = listener.accept()
            with client:
                assert client.recv(1000) == b""


def test_health_is_requested_without_the_key(serve):
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        client, _ = listener.accept()
        with client:
            received.append(client.recv(65_536))
            client.sendall(b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\n{}")

    thread = threading.Thread(target=answer)
    thread.start()
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert endpoint.probe(url, "secret-key-0123456789") is None
        thread.join(60)
    assert received[0].startswith(b"GET /health ")
    assert b"secret" not in received[0]


def test_too_small_context_is_refused_before_the_agent_runs(serve, aider, configure_port, capfd):
    configure_port(serve(FakeEngine()).port)
    assert main(["launch", "aider"]) == 1
    said = capfd.readouterr().err
    assert "fake has a context of 4,096 tokens, and aider needs 4,925 (its first request" in said
    assert "edgeinfer serve fake --ctx 8192" in said
    assert not aider.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_agent_outlives_its_launch(serve, aider, configure_port, tmp_path, number):
    configure_port(serve(FakeEngine(info=replace(DEFAULT_INFO, n_ctx=32768))).port)
    pid_file = tmp_path / "pid"
    program = tmp_path / "bin/aider"
    program.write_text(
        f"#!/bin/sh\necho $$ >{pid_file}.part; mv {pid_file}.part {pid_file}; exec sleep 600\n"
    )
    launch = subprocess.Popen([sys.executable, "-m", "edgeinfer", "launch", "aider"])
    wait_until(pid_file.exists, "the agent")
    agent = int(pid_file.read_text())
    launch.send_signal(number)
    launch.wait(60)
    try:
        wait_until(lambda: has_ended(agent), "the agent to end")
    finally:
        if not has_ended(agent):
            os.kill(agent, signal.SIGKILL)


def test_missing_agent_has_an_install_hint(monkeypatch, capfd):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "claude"]) == 2
    assert "npm install -g @anthropic-ai/claude-code" in capfd.readouterr().err
    assert main(["launch", "claud"]) == 2
    assert "did you mean claude?" in capfd.readouterr().err


def test_list_marks_installed_agents(aider, capfd):
    assert main(["launch", "--json"]) == 0
    agents = {a["name"]: a for a in json.loads(capfd.readouterr().out)["result"]["agents"]}
    assert agents.keys() == AGENTS.keys()
    assert agents["aider"]["path"].endswith("/bin/aider")


def test_launch_starts_an_endpoint_and_reuses_it(aider, configure_port, tmp_path, capfd):
    configure_port(0)  # port 0: no running endpoint is found, and the kernel chooses a port
    model = make_llama(tmp_path / "chatterer.gguf", n_ctx=8192)
    assert main(["launch", "--model", str(model), "aider", "one"]) == 7
    assert "which ends after 10 minutes" in capfd.readouterr().err
    assert json.loads(aider.read_text())["model"] == "openai/chatterer"
    try:
        assert main(["launch", "aider", "two"]) == 7
        assert "started" not in capfd.readouterr().err
        assert json.loads(aider.read_text())["argv"] == ["two"]
    finally:
        # name the model, so that no other endpoint of this user is stopped
        stop = [sys.executable, "-m", "edgeinfer", "stop", str(model)]
        assert subprocess.run(stop).returncode == 0


def test_failed_serve_is_quoted(aider, configure_port, tmp_path, capfd):
    configure_port(0)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    assert main(["launch", "--model", str(broken), "aider"]) == 5
    assert main(["launch", "--model", "nobody", "aider"]) == 3
    assert not aider.exists()


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_gets_endpoint_model_and_key(name, tmp_path):
    url = "http://127.0.0.1:8097"
    target = AgentTarget(url=url, model="some-model", n_ctx=40_960, key="secret-key")
    arguments, variables = AGENTS[name].setup(target, tmp_path)
    files = [path.read_text() for path in tmp_path.iterdir()]
    told = "\n".join([*arguments, *variables.values(), *files])
    for setting in (target.url, target.model, target.key, str(target.n_ctx)):
        assert setting in told or (name, setting) == ("qwen", str(target.n_ctx))


@pytest.mark.parametrize(
    ("user_agent", "agent"),
    [
        ("claude-cli/2.1.330 (external, sdk-cli)", "claude"),
        ("codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm", "codex"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen"),
        ("OpenAI/JS 6.26.0", ""),
        ("", ""),
    ],
)
def test_agent_is_known_by_its_user_agent(user_agent, agent):
    assert agent_of(user_agent) == agent
