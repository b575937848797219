"""The units of docs/systemd: systemd and our parser accept them, and the launcher uses the socket."""

import configparser
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from other_processes import run

from edgeinfer.cli.parser import build_parser
from edgeinfer.platform import paths
from edgeinfer.server.limits import Limits

UNITS = Path(__file__).parents[3] / "docs/systemd"


def _unit(name: str) -> configparser.ConfigParser:
    """Read a unit file, keeping capitals and `%`."""
    unit = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((UNITS / name).read_text("utf-8"))
    return unit


def _command() -> list[str]:
    """Return the arguments of the unit's command."""
    program, *arguments = shlex.split(_unit("edgeinfer.service")["Service"]["ExecStart"])
    assert program == "%h/.local/bin/edgeinfer"
    return arguments


def test_the_units_say_what_the_command_line_takes():
    options = build_parser().parse_args(_command())
    assert (options.idle_exit, options.log) == (600, "json")
    service, listening = _unit("edgeinfer.service"), _unit("edgeinfer.socket")
    assert service["Unit"]["Requires"] == "edgeinfer.socket"
    assert service["Service"]["NotifyAccess"] == "all"
    assert listening["Socket"]["ListenStream"] == "127.0.0.1:8080"
    assert listening["Install"]["WantedBy"] == "sockets.target"
    stop_s = int(service["Service"]["TimeoutStopSec"])
    assert stop_s > Limits().drain_s


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_to_say_about_the_units(tmp_path):
    program = tmp_path / "edgeinfer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in UNITS.iterdir():
        text = unit.read_text("utf-8").replace("%h/.local/bin/edgeinfer", str(program))
        (tmp_path / unit.name).write_text(text)
    units = [str(tmp_path / unit.name) for unit in UNITS.iterdir()]
    # a short path, because that of a unix socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="units-") as runtime:
        variables = {**os.environ, "XDG_RUNTIME_DIR": runtime}
        command = ("systemd-analyze", "--user", "--man=no", "verify", *units)
        verified = run(*command, env=variables, check=False)
    names = (str(tmp_path), "edgeinfer")
    said = [line for line in verified.stderr.splitlines() if any(name in line for name in names)]
    assert (verified.returncode, said) == (0, []), verified.stderr


def test_the_nights_batches_are_answered_one_by_one(tmp_path):
    """Run the unit's command with a fake `edgeinfer` that fails for one of the files."""
    program = tmp_path / ".local/bin/edgeinfer"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\ncp "$2" "$3"\n! grep -q broken "$2"\n')
    program.chmod(0o755)
    batches = tmp_path / "batch"
    batches.mkdir()
    (batches / "one of two.jsonl").write_text("broken\n")
    (batches / "two.jsonl").write_text("fine\n")
    unit = (UNITS / "edgeinfer-batch.service").read_text("utf-8").replace("\\\n", "")
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    command = line.removeprefix("ExecStart=").replace("%h", str(tmp_path)).replace("$$", "$")
    done = run(*shlex.split(command), check=False)
    assert (done.returncode, done.stderr) == (1, "")
    answers = {path.name: path.read_text() for path in (batches / "answers").iterdir()}
    assert answers == {"one of two.jsonl": "broken\n", "two.jsonl": "fine\n"}


#: Passes a socket as systemd does: as descriptor 3, with this process's id in the environment.
ACTIVATED = """
import os, sys
os.dup2(int(sys.argv.pop(1)), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="edgeinfer.socket")
from edgeinfer.launcher import main
sys.exit(main())
"""


@pytest.mark.model
def test_the_launcher_serves_on_the_socket_that_systemd_holds(smollm2, tmp_path):
    arguments = _command()
    arguments[arguments.index("--idle-exit") + 1] = "1"
    config = paths.config_dir() / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        f"default-model = {json.dumps(str(smollm2))}\n"
        "[load]\nctx = 512\nparallel = 1\n[snapshots]\nauto-warm = false\n"
    )
    address = str(tmp_path / "notify")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(address)
        manager.settimeout(60)
        url = "http://{}:{}".format(*listener.getsockname())
        # this client connects before the endpoint runs, and waits in the socket's queue
        with socket.create_connection(listener.getsockname()) as early:
            early.settimeout(60)
            early.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            with subprocess.Popen(
                [sys.executable, "-c", ACTIVATED, str(listener.fileno()), *arguments],
                pass_fds=[listener.fileno()],
                env={**os.environ, "NOTIFY_SOCKET": address},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                assert early.recv(4096).startswith(b"HTTP/1.1 200")
                assert manager.recv(4096).startswith(b"READY=1\nSTATUS=serving")
                assert manager.recv(4096).startswith(b"STOPPING=1")
                said = [json.loads(line) for line in process.stderr if line.startswith("{")]
                assert process.wait(60) == 0
    assert [line["url"] for line in said if line["event"] == "listening"] == [url]
    assert [line["why"] for line in said if line["event"] == "draining"] == ["idle"]
