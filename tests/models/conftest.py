"""Fixtures of pulls: a local Hugging Face hub that can misbehave, and the command line as a process."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomlkit
from fake_hub import FaultServer

from edgeinfer.models.catalog import user_path
from edgeinfer.models.progress import RetryPolicy
from edgeinfer.models.pull import PullOptions
from edgeinfer.platform import paths

#: Short pauses, so that tests of retries are fast.
HASTY = RetryPolicy(attempts=3, pause_s=0.001)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    fault_server = FaultServer()
    thread = threading.Thread(target=fault_server.httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield fault_server
    fault_server.release.set()
    fault_server.httpd.shutdown()
    fault_server.httpd.server_close()
    thread.join()


@pytest.fixture
def options() -> PullOptions:
    """Options of a pull with the name `tiny` and short pauses."""
    return PullOptions(name="tiny", retry_policy=HASTY)


@pytest.fixture
def url(server: FaultServer, body: bytes) -> str:
    """URL at which the server has `body`."""
    server.files["/tiny.gguf"] = body
    return f"{server.url}/tiny.gguf"


def part() -> Path:
    """Return the path of the partial file of a pull of `url`."""
    return paths.models_dir() / ".partial/tiny/tiny.gguf.part"


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_cli() -> Iterator[Start]:
    """Start the command line as a process; it is killed at the end of the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, before: str = "") -> subprocess.Popen[bytes]:
        program = f"import sys\n{before}\nfrom edgeinfer.cli.main import main\nsys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write_models_toml(name: str, *sources: str | list[str], **keys: object) -> None:
    """Write the user's models.toml with one model; an underscore in a key stands for a hyphen."""
    entry = {"title": "T", "sources": list(sources)}
    entry |= {key.replace("_", "-"): value for key, value in keys.items()}
    user_path().parent.mkdir(parents=True, exist_ok=True)
    user_path().write_text(tomlkit.dumps({"models": {name: entry}}))
