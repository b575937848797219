"""An error keeps its class, its hint and so its exit code on every link between two processes."""

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from edgeinfer import error_text
from edgeinfer.cli.result import error_envelope
from edgeinfer.errors import (
    DumpError,
    EdgeInferError,
    InvalidRequestError,
    OutOfMemoryError,
    SnapshotStaleError,
    from_fields,
    to_fields,
)
from edgeinfer.host import Start
from edgeinfer.launcher.launch import Launcher
from edgeinfer.launcher.selection import LaunchChoice
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.snapshots.build import builder, jobs
from edgeinfer.snapshots.inputs import SnapshotInputs
from edgeinfer.snapshots.restore import app_host
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.workers.remote_engine import RemoteEngine, serve_engine

MESSAGE, HINT = "a context of 9 tokens needs 9 MiB", "give it --ctx 4"


def raised_here() -> OutOfMemoryError:
    return OutOfMemoryError(MESSAGE, hint=HINT)


def survives(error: EdgeInferError) -> bool:
    return (
        type(error) is OutOfMemoryError
        and error_text.exit_code(error) == 6
        and error_text.hint(error) == HINT
        and MESSAGE in error.message
    )


@pytest.mark.parametrize(
    "error",
    [
        EdgeInferError("it broke"),
        OutOfMemoryError("no room", hint=""),
        InvalidRequestError("no", param="tools[0]", hint="drop it"),
        SnapshotStaleError("other kernel", key="kernel"),
        DumpError("/home/\udcff is full"),
    ],
    ids=lambda error: error.code,
)
def test_fields_hold_all_that_an_error_says(error):
    sent = {name: os.fsencode(value) for name, value in to_fields(error).items()}
    again = from_fields(sent)
    assert (type(again), vars(again)) == (type(error), vars(error))


def test_a_code_of_another_version_gives_the_root():
    assert type(from_fields({"code": "of-tomorrow", "message": "x"})) is EdgeInferError


#: The real main of a child process on descriptor argv[1], whose work runs out of memory.
PARK = """
import os, sys
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.snapshots.build import park
def prepare(link, request):
    raise OutOfMemoryError(sys.argv[2], hint=sys.argv[3])
park.prepare = prepare
os.dup2(int(sys.argv[1]), park.LINK_FD)
os.close(int(sys.argv[1]))
park.main()
"""
BUILDER = """
import sys
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.snapshots.build import builder
builder.Builder.__init__ = lambda *_: None
def build(self):
    raise OutOfMemoryError(sys.argv[3], hint=sys.argv[4])
builder.Builder.build = build
builder.main()
"""


def start(program: str, link: socket.socket, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", program, str(link.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=[link.fileno()])
    link.close()
    return process


def request() -> builder.BuildRequest:
    inputs = SnapshotInputs(
        model="m", files=ModelFiles(paths=("m.gguf",), name="m"), options=LoadOptions()
    )
    return builder.BuildRequest(inputs=inputs, depends_on="", criu="criu", version="", tier="root")


def test_from_the_parked_process_to_the_builder(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, start(PARK, theirs, MESSAGE, HINT) as process:
        with pytest.raises(OutOfMemoryError) as raised:
            builder.Builder(ours, tmp_path, request())._converse(ours, ours)
        assert process.wait(30) == 1
    assert survives(raised.value)


def test_from_the_builder_to_who_ordered_the_build(tmp_path):
    ours, theirs = socket.socketpair()
    folder = tmp_path / "new"
    with ours, start(BUILDER, theirs, str(folder), MESSAGE, HINT) as process:
        with pytest.raises(OutOfMemoryError) as raised:
            jobs._listen(ours, request(), lambda *_: None, process, tmp_path / "log")
        assert process.wait(30) == 0
    assert survives(raised.value)


def test_from_a_worker_to_its_engine_s_stand_in():
    here, there = socket.socketpair()

    def load(_progress):
        raise raised_here()

    worker = threading.Thread(target=serve_engine, args=(there, Start(), load))
    worker.start()
    with pytest.raises(OutOfMemoryError) as raised:
        RemoteEngine(here)
    worker.join(10)
    assert survives(raised.value)


def test_from_the_launcher_to_an_app_that_asks_for_a_worker(monkeypatch):
    ours, theirs = socket.socketpair()
    launcher = Launcher(["chat"], 0, 0)
    launcher._apps.choice = LaunchChoice("m", {}, "auto")

    def no_start(*_):
        raise raised_here()

    monkeypatch.setattr(launcher._apps, "start", no_start)
    answering = threading.Thread(
        target=lambda: launcher._read_app(SimpleNamespace(link=theirs, role="verb"))
    )
    answering.start()
    with ours, theirs, pytest.raises(OutOfMemoryError) as raised:
        AppHost(Start(), ours, None).worker("m", LoadOptions())
    answering.join(10)
    assert survives(raised.value)


def follow(output: bytes) -> None:
    """Follow a build that has printed `output`."""
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as warming:
        warming.write(output)
    app_host.follow_build("m", read_fd, None, None, lambda: None)


def test_from_a_warm_that_the_chat_watches():
    with pytest.raises(OutOfMemoryError) as raised:
        follow(b"load ...\n" + error_envelope(raised_here()) + b"\n")
    assert survives(raised.value)
    assert raised.value.message == f"m was not warmed: {MESSAGE}"
    with pytest.raises(DumpError, match="m was not warmed: Killed"):
        follow(b"Killed\n")  # it died without an envelope


@pytest.mark.criu
@pytest.mark.model
def test_a_context_that_does_not_fit_says_so_through_every_process_of_a_warm(user):
    outcome = user.run("warm", "small", "--ctx", "16000000", "--json", "--quiet")
    assert outcome.code == 6
    assert outcome.error["code"] == "out-of-memory"
    assert "--ctx" in outcome.error["hint"]
