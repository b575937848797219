"""An error keeps its class, hint and exit code on every link between two processes."""

import os
import socket
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
from edgeinfer.host import ProcessStart
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.launcher.launch import Launcher
from edgeinfer.launcher.selection import LaunchChoice
from edgeinfer.runtime.options import LoadOptions
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


def test_from_a_worker_to_its_engine_s_stand_in():
    live_server, worker_end = socket.socketpair()

    def load(_progress):
        raise raised_here()

    worker = threading.Thread(target=serve_engine, args=(worker_end, load))
    worker.start()
    with pytest.raises(OutOfMemoryError) as raised:
        RemoteEngine(live_server)
    worker.join(60)
    assert survives(raised.value)


def test_from_the_launcher_to_an_app_that_asks_for_a_worker(monkeypatch):
    app_end, launcher_end = socket.socketpair()
    launcher = Launcher(CommandLine(["chat"]), 0, 0)
    launcher._apps.choice = LaunchChoice("m", {}, "auto")

    def no_start(*_):
        raise raised_here()

    monkeypatch.setattr(launcher._apps, "start", no_start)
    app = SimpleNamespace(link=launcher_end, role="verb")
    answering = threading.Thread(target=lambda: launcher._read_app(app))
    answering.start()
    with app_end, launcher_end, pytest.raises(OutOfMemoryError) as raised:
        AppHost(ProcessStart(), app_end, None).worker("m", LoadOptions())
    answering.join(60)
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
        follow(b"Killed\n")  # the build was killed and printed no JSON


@pytest.mark.criu
@pytest.mark.model
def test_a_context_that_does_not_fit_says_so_through_every_process_of_a_warm(user):
    outcome = user.run("warm", "small", "--ctx", "16000000", "--json", "--quiet")
    assert outcome.code == 6
    assert outcome.error["code"] == "out-of-memory"
    assert "--ctx" in outcome.error["hint"]
