"""The first start: unpacked once, whole or not there, with words for everything that can be wrong."""

import os
import re
import signal
import sys
import urllib.request

import pytest
from made_shipped import variant
from other_processes import run

from ..conftest import flip_bit
from .conftest import HOME, PROGRAM, ROOT

sys.path.insert(0, str(ROOT / "build"))

import floor

from edgeinfer.runtime.llama import libedgeinfer
from edgeinfer.shipping import payload
from edgeinfer.shipping.payload import open_shipped


@pytest.fixture(scope="session")
def second(binary, tmp_path_factory):
    """A second version of the shipped file, and the name of its folder."""
    return variant(binary, tmp_path_factory.mktemp("second"), {"share/NOTE": "a second version\n"})


def test_unpacks_once_and_says_so(machine, binary):
    first = machine.run("--version")
    assert re.fullmatch(r"edgeinfer [\d.]+\n", first.stdout)
    assert "first start: unpacking" in first.stderr
    assert machine.apps == [open_shipped(binary).app]
    again = machine.run("--version")
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_home_with_other_letters(machine):
    """A machine with libc alone has no locale but C."""
    home = f"{HOME}/\u017elu\u0165ou\u010dk\u00fd"
    machine.run("--version", EDGEINFER_HOME=home)
    assert machine.run("--version", EDGEINFER_HOME=home).stderr == ""


def test_home_that_is_not_utf_8(machine):
    done = machine.run("--version", check=False, EDGEINFER_HOME=f"{HOME}/caf\udce9")
    assert done.returncode == 70
    assert "not valid UTF-8" in done.stderr


def test_what_was_unpacked_is_what_was_built(machine):
    verified = machine.json("doctor", "--verify")
    assert verified["findings"] == []
    assert verified["files_checked"] > 100


def test_self_check_finds_an_altered_file(machine):
    machine.run("--version")
    notes = machine.home / ".local/share/edgeinfer/app" / machine.apps[0] / "share/INSTALL.md"
    notes.write_text(notes.read_text().replace("edgeinfer", "edgeinfeR", 1))
    done = machine.run("doctor", "--verify", check=False)
    assert done.returncode == 5
    assert "share/INSTALL.md: altered" in done.stdout


def test_two_first_starts_at_once(machine):
    both = [machine.start("--version") for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert sum("unpacking" in err and "MiB" in err for _, err in ends) == 1
    assert len(machine.apps) == 1


def test_home_that_cannot_be_written(machine):
    done = machine.run("--version", options=("--read-only", HOME), check=False)
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr
    assert "EDGEINFER_HOME" in done.stderr
    assert "Traceback" not in done.stderr
    assert machine.run("--version").returncode == 0


def test_disk_that_becomes_full_then_has_room(machine):
    full = ("--tmpfs", f"{HOME}=60m", "--grow", f"{HOME}=400m")
    done = machine.run("--version", options=full)
    assert "first run: 6, left: []" in done.stderr
    assert "are free" in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout.startswith("edgeinfer ")


def test_disk_whose_quota_ends_in_the_middle(machine, monkeypatch):
    """The check before unpacking cannot see every limit: a file-size limit hits while a library is
    written.
    """
    import resource

    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, 12 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command, environment = machine.command("--version"), machine.environment()
    done = run(*command, env=environment, preexec_fn=limit_file_size, check=False)
    assert done.returncode != 0
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert machine.apps == []
    assert machine.run("--version").returncode == 0


@pytest.mark.parametrize("region", ["magic", "index", "block", "archive's trailer"])
def test_flipped_bit_is_refused(machine, binary, region):
    shipped = open_shipped(binary)
    offset = {
        "magic": shipped.payload_offset,
        "index": shipped.payload_offset + 500,
        "block": shipped.payload_offset + shipped.payload_length // 2,
        "archive's trailer": shipped.archive_offset - payload.TRAILER.size + 3,
    }[region]
    flip_bit(machine.root / PROGRAM[1:], offset)
    done = machine.run("--version", check=False)
    assert done.returncode in (1, 5)
    assert "damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert machine.apps == []


def test_application_of_another_user_is_not_started(machine):
    machine.run("--version")
    app = machine.home / ".local/share/edgeinfer/app" / machine.apps[0]
    app.chmod(0o777)
    done = machine.run("--version", check=False)
    assert done.returncode != 0
    assert "other users can change" in done.stderr


def test_update_beside_a_running_version(used, second, binary, tmp_path):
    if os.geteuid() != 0:
        pytest.skip(
            "two bare roots of an ordinary user do not see each other's processes: it needs root"
        )
    name = open_shipped(binary).app
    serving = used.start("serve", "smollm2-135m-instruct", "--port", "0", "--resume", "never")
    try:
        port = wait_for_port(serving)
        used.install(second[0])
        assert used.run("--version").stderr.count("first start") == 1
        assert used.apps == sorted([name, second[1]])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            assert answer.status == 200
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
    used.run("list")
    assert used.apps == [second[1]]
    used.install(binary)
    used.run("--version")
    used.run("list")
    assert used.apps == [name]


def wait_for_port(process):
    """Return the port that `serve` prints on stderr when it is ready."""
    said = []
    for line in process.stderr:
        said.append(line)
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if match:
            return int(match.group(1))
    raise AssertionError("".join(said))


def test_needs_no_newer_libc_than_promised(used):
    """Every symbol version the shipped libraries ask of libc is one that glibc 2.31 has: install.md's
    promise, and what the roots of these tests hold. CRIU brings a libc of its own.
    """
    app = used.home / ".local/share/edgeinfer/app" / used.apps[0]
    versions = run("readelf", "-VW", *elf_files(app), used.root / PROGRAM[1:])
    needed = re.findall(r"Name: GLIBC_(\d+)\.(\d+)\S*  Flags: none", versions.stdout)
    assert max((int(major), int(minor)) for major, minor in needed) <= floor.FLOOR
    assert "glibc {}.{} or newer".format(*floor.FLOOR) in (ROOT / "docs/start/install.md").read_text()
    assert (app / "criu/bin/criu").exists()


def test_kernels_of_our_own_open_on_the_oldest_libc(used):
    version = used.json("version")
    assert version["kernels"] == libedgeinfer.level_of(version["cpu_variant"])


def elf_files(app):
    """Return the programs and libraries of an unpacked application but CRIU's."""
    paths = (path for path in sorted(app.rglob("*")) if "criu" not in path.parts)
    files = (path for path in paths if path.is_file() and not path.is_symlink())
    return [p for p in files if floor.is_elf(p)]


def test_starts_on_this_machines_libc_too(modern):
    assert modern.run("doctor", check=False).stdout.count("llama.cpp") == 1
