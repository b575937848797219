"""With `EDGEINFER_OFFLINE=1` no verb opens a socket to the network (as seen by `sockets_seen`)."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from sockets_seen import run_seen

from edgeinfer.cli.parser import VERBS

pytestmark = pytest.mark.model
PROGRAM = Path(sys.executable).with_name("edgeinfer")
MODEL = "small"
LAUNCH = ("--resume", "never", "--ctx", "512")
#: Verb → its arguments, and its exit status (None: any).
COMMANDS = {
    "chat": ((MODEL, "--plain", *LAUNCH), 0),
    "run": ((MODEL, "Hello", "--max-tokens", "2", "--receipt", "receipt.json", *LAUNCH), 0),
    "verify": (("receipt.json", "--ctx", "512"), 0),
    "batch": (("in.jsonl", "out.jsonl", "--model", MODEL), 0),
    "eval": (("items.jsonl", MODEL, "--ctx", "512"), 0),
    "launch": ((), 0),  # it lists agents: to run one would use the network
    "pull": (("qwen3-4b",), 4),
    "list": ((), 0),
    "show": ((MODEL,), 0),
    "rm": (("other", "--forget", "--yes"), 0),
    "quantize": ((MODEL, "q8_0", "--name", "eight"), None),
    "warm": ((MODEL,), None),  # CRIU fails: it cannot dump a process under a seccomp filter
    "snapshots": (("list",), 0),
    "forget": ((), None),
    "ps": ((), 0),
    "stop": (("nobody",), 2),
    "backend": (("install", "cuda"), None),  # it first asks the driver for its version
    "doctor": ((), None),
    "update": ((), 1),  # it does not update a Python package
    "drift": ((), 0),
    "tools": ((), 0),
    "version": ((), 0),
    "config": ((), 0),
    "completion": (("words", "run", ""), 0),
}
#: Arguments for which a verb would use the network. Addresses are of TEST-NET-1.
ASKING = {
    "pull oci://192.0.2.1/library/tiny:1b": 4,
    "pull s3://bucket/tiny.gguf": 4,
    "pull https://192.0.2.1/tiny.gguf": 4,
    "pull owner/repo:Q8_0": 4,
    "pull wheel:tiny==1.0/tiny/tiny.gguf": 4,
    "pull owner/adapter --base small": 4,
    "snapshots import oci://192.0.2.1/people/small:a": 4,
    "list --fits": 0,
}
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
BATCH |= {"body": {"prompt": "Hi", "max_tokens": 2}}


@pytest.fixture(scope="module")
def home(smollm2, tmp_path_factory) -> Path:
    """Return a home folder with the small model under two names, without background builds."""
    home = tmp_path_factory.mktemp("offline")
    (home / "ei/config").mkdir(parents=True)
    (home / "ei/config/config.toml").write_text("[snapshots]\nauto-warm = false\n")
    (home / "in.jsonl").write_text(json.dumps(BATCH) + "\n")
    item = {"id": "1", "prompt": "Hi", "choices": ["a", "b"], "answer": 0}
    (home / "items.jsonl").write_text(f"{json.dumps(item)}\n")
    for name in (MODEL, "other"):
        pull = ["pull", str(smollm2), "--name", name, "--in-place", "--quiet"]
        subprocess.run([PROGRAM, *pull], env=_environment(home), cwd=home, check=True)
    return home


def _environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "EDGEINFER_HOME": str(home / "ei"),
        "EDGEINFER_OFFLINE": "1",
        "EDGEINFER_CRIU": "/bin/false",
        "LANG": "C.UTF-8",
    }


def _run_and_watch(home: Path, *arguments: str):
    command, environment = [PROGRAM, *arguments], _environment(home)
    pipe = subprocess.PIPE
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True}
    return run_seen(lambda: subprocess.Popen(command, env=environment, cwd=home, **streams))


def test_every_verb_is_here():
    assert set(VERBS) == {*COMMANDS, "serve", "web", "bench"}


def test_endpoint_only_listens(home):
    process, watch = _run_and_watch(home, "serve", MODEL, "--port", "0", *LAUNCH)
    said = []
    for line in process.stderr:
        said.append(line)
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            break
    else:
        raise AssertionError("".join(said))
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    url = f"http://127.0.0.1:{match[1]}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    watch.join()
    assert set(watch.seen) == {"socket 2 1"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("web",), None),  # it starts no endpoint, because the default model is not here
        (("bench", MODEL, "-p", "8", "-n", "1", "-r", "1", "--ctx", "512", "--quiet"), 0),
    ],
)
def test_this_machine_alone_is_asked_for_an_endpoint(home, arguments, code):
    process, watch = _run_and_watch(home, *arguments)
    out, err = process.communicate(timeout=250)
    watch.join()
    assert set(watch.seen) <= {"socket 2 1", "connect 2 127.0.0.1"}
    assert code is None or process.returncode == code, (out, err)


@pytest.mark.parametrize("command", ASKING)
def test_arguments_that_need_the_network_are_refused_without_using_it(home, command):
    process, watch = _run_and_watch(home, *command.split())
    out, err = process.communicate(timeout=250)
    watch.join()
    assert watch.seen == []
    assert process.returncode == ASKING[command], (out, err)


@pytest.mark.parametrize("verb", COMMANDS)
def test_no_verb_uses_the_network(home, verb):
    arguments, code = COMMANDS[verb]
    process, watch = _run_and_watch(home, verb, *arguments)
    out, err = process.communicate(timeout=250)
    watch.join()
    assert watch.seen == []
    assert code is None or process.returncode == code, (out, err)
    assert "Traceback" not in err


def test_network_access_is_seen():
    code = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    process, watch = run_seen(lambda: subprocess.Popen([sys.executable, "-c", code], text=True))
    process.wait()
    watch.join()
    assert watch.seen == ["socket 2 2", "connect 2 192.0.2.1"]
