"""`ps` and `stop`, for processes of this home folder and of others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from other_processes import wait_until

from edgeinfer.cli.main import main
from edgeinfer.launcher import builds
from edgeinfer.platform import paths
from edgeinfer.platform.disk import locked
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots.inputs import ProcessDescription

#: A launch, whose app publishes the text in LOADED as its description.
PROGRAM = """
import os, sys
loaded = os.environ.get("LOADED")
if loaded and not os.fork():
    open("/proc/self/comm", "w").write("edgeinfer")
    os.write(os.memfd_create("edgeinfer-description"), loaded.encode())
    loaded = None
if not loaded:
    print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_launch(tmp_path: Path):
    """Start a process that looks like a launch, with this home folder or another."""
    script = tmp_path / "edgeinfer"
    script.write_text(PROGRAM)
    started: list[subprocess.Popen[str]] = []

    def start(*typed: str, home: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, **({"EDGEINFER_HOME": home} if home else {})}
        process = subprocess.Popen(
            [sys.executable, str(script), *typed],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def list_pids(as_json):
    return lambda *typed: {process["pid"] for process in as_json("ps", *typed)["running"]}


def test_another_home_is_left_alone_unless_everywhere_is_asked(
    start_launch, list_pids, as_json, tmp_path, capsys
):
    mine = start_launch("serve", "m")
    other = start_launch("serve", "m", home=str(tmp_path / "other"))
    assert list_pids() & {mine.pid, other.pid} == {mine.pid}
    assert {mine.pid, other.pid} <= list_pids("--everywhere")
    assert main(["stop", str(other.pid)]) == 2
    assert "`edgeinfer ps --everywhere`" in capsys.readouterr().err
    assert as_json("stop", "--all")["stopped"] == [mine.pid]
    assert other.poll() is None
    assert as_json("stop", "--everywhere", str(other.pid))["stopped"] == [other.pid]


def test_launch_is_stopped_by_the_model_that_it_has_loaded(start_launch, as_json, monkeypatch):
    loaded = ProcessDescription(
        model="mine:Q8_0",
        files=ModelFiles(name="mine:Q8_0", paths=()),
        options=LoadOptions(),
        program="",
    )
    plain = start_launch("serve", "--port", "1234")
    monkeypatch.setenv("LOADED", msgspec.json.encode(loaded).decode())
    serving = start_launch("serve")
    assert "no running process" in as_json("stop", "mine", code=2)["message"]
    assert as_json("stop", "Mine:q8_0")["stopped"] == [serving.pid]
    assert plain.poll() is None


def test_file_is_not_stopped_by_the_name_of_a_model():
    files, options = ModelFiles(name="mine", paths=("/x/mine.gguf",)), LoadOptions()
    loaded = ProcessDescription(model="/x/mine.gguf", files=files, options=options, program="")
    assert loaded.is_of("/x/../x/mine.gguf")
    assert not loaded.is_of("mine")
    assert msgspec.structs.replace(loaded, model="Mine:latest").is_of("mine")


def test_background_build_is_listed_and_stopped(list_pids, as_json):
    lock = paths.private_dir(paths.state_dir()) / jobs.BACKGROUND_LOCK
    command = [sys.executable, "-P", "-m", builds.JOBS, "m", "{}"]
    with locked(lock), subprocess.Popen(command) as build:
        try:
            wait_until(lambda: build.pid in list_pids(), "the build")
            (row,) = as_json("ps")["running"]
            assert (row["verb"], row["arguments"]) == ("warm", ["m"])
            assert as_json("stop", "--all")["stopped"] == [build.pid]
        finally:
            build.kill()


def test_launch_that_a_signal_has_stopped_ends_at_once(start_launch, as_json):
    suspended = start_launch("chat", "m")
    suspended.send_signal(signal.SIGSTOP)
    outcome = as_json("stop", "--all")
    assert (outcome["stopped"], outcome["killed"]) == ([suspended.pid], [])


def test_chat_without_its_verb_is_listed(start_launch, list_pids):
    assert start_launch("--continue").pid in list_pids()
