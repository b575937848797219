"""`ps` and `stop`, for processes of this home folder and of others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_processes import wait_until

from edgeinfer.cli.main import main
from edgeinfer.launcher import builds
from edgeinfer.platform import paths
from edgeinfer.platform.disk import locked
from edgeinfer.snapshots.builder import jobs

PROGRAM = "import sys\nprint('up', flush=True)\nsys.stdin.read()\n"


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
