"""`serve --ollama` listens on Ollama's port too, started by the launcher or without it."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest
from made_models import make_llama
from other_processes import run

PROGRAM = "import sys; from edgeinfer.cli.main import main; sys.exit(main())"
START = {"launcher": [sys.executable, "-m", "edgeinfer"], "alone": [sys.executable, "-c", PROGRAM]}


@pytest.fixture
def ollama_port(monkeypatch):
    """A listener on Ollama's port, and the port, which is free once the test closes the listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("EDGEINFER_OLLAMA_PORT", str(port))
        yield listener, port


@contextlib.contextmanager
def _serving(start: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*START[start], "serve", *arguments, "--port", "0", "--log", "json", "--resume", "never"]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def _urls(process: subprocess.Popen[str]) -> list[str]:
    for line in process.stderr:
        said = json.loads(line) if line.startswith("{") else {}
        if said.get("event") == "listening":
            return said["url"].split()
    pytest.fail("the endpoint did not come up")


@pytest.mark.parametrize("start", START)
def test_both_addresses_answer(ollama_port, tmp_path, start):
    listener, port = ollama_port
    listener.close()
    model = make_llama(tmp_path / "made.gguf")
    with _serving(start, str(model), "--ctx", "256", "--threads", "1", "--ollama") as process:
        own_url, ollamas = _urls(process)
        assert ollamas == f"http://127.0.0.1:{port}"
        assert httpx2.get(ollamas, timeout=60).text == "Ollama is running"
        assert httpx2.get(own_url, timeout=60).text == "Ollama is running"
        (listed,) = httpx2.get(f"{ollamas}/api/tags", timeout=60).json()["models"]
        asked = {"model": listed["model"], "prompt": "x", "stream": False}
        asked["options"] = {"num_predict": 2, "temperature": 0}
        answer = httpx2.post(f"{ollamas}/api/generate", json=asked, timeout=60)
        assert answer.json()["eval_count"] == 2
    assert process.returncode == 0


@pytest.mark.parametrize("start", START)
def test_port_in_use_is_reported(ollama_port, tmp_path, start):
    _, port = ollama_port
    model = make_llama(tmp_path / "made.gguf")
    command = [*START[start], "serve", str(model), "--port", "0", "--ollama", "--resume", "never"]
    done = run(*command, check=False)
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "leave out --ollama" in done.stderr


def test_ollama_port_refuses_tls(ollama_port, tmp_path):
    model = make_llama(tmp_path / "made.gguf")
    (tmp_path / "pem").touch()
    arguments = ["--ollama", "--tls-cert", str(tmp_path / "pem"), "--tls-key", str(tmp_path / "pem")]
    command = [*START["alone"], "serve", str(model), "--port", "0", *arguments]
    done = run(*command, check=False)
    assert done.returncode == 2
    assert "plain HTTP" in done.stderr


def test_without_the_option_the_port_is_free(ollama_port, tmp_path):
    listener, port = ollama_port
    listener.close()
    model = make_llama(tmp_path / "made.gguf")
    with _serving("alone", str(model), "--ctx", "256", "--threads", "1") as process:
        (own_url,) = _urls(process)
        assert httpx2.get(own_url, timeout=60).text == "edgeinfer is running"
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port)):
            pass
