"""Snapshots survive kills at each stage, full disks, damaged files, unsafe folders and a broken CRIU."""

import json
import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from other_processes import descendants, run

from edgeinfer.snapshot_format.criu import MINIMUM, candidates, version_of

from ..conftest import flip_bit
from .conftest import MODEL, small_disk

pytestmark = pytest.mark.criu
STAGES = ("load", "prefill", "warm up", "dump", "copy memory", "verify")


@pytest.fixture
def snapshot_to_spoil(warm):
    """The warm model's snapshot, which the test may damage; it is restored afterwards."""
    folder = warm.snapshot()
    aside = folder.with_name(".aside")
    subprocess.run(["cp", "-a", folder, aside], check=True)
    yield warm, folder
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def folders(person) -> set[str]:
    return {path.name for path in person.snapshots.glob("*@*")}


def killed_at(person, stage):
    """Start a warm and kill it at a stage."""
    process = person.popen("warm", MODEL, "--ctx", "768")
    line = ""
    while not line.startswith(stage):
        line = process.stderr.readline()
        assert line, f"warm ended before {stage}"
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.needs("time")
def test_killing_warm_at_any_stage_leaves_no_half_snapshot(warm):
    before = folders(warm)
    for stage in STAGES:
        killed_at(warm, stage)
        complete = {path.parent.name for path in warm.snapshots.glob("*/manifest")}
        assert {name.partition("@")[0] for name in complete} == {MODEL}, stage
    listed = warm.run("snapshots", "--json").result["snapshots"]
    assert [s["details"]["name"] for s in listed] == [MODEL]
    # each build removes what a killed one has left
    warm.run("warm", MODEL, "--ctx", "640", "--quiet").check()
    leftovers = {name for name in folders(warm) - before if not name.startswith(f"{MODEL},ctx=640@")}
    assert leftovers == set()
    warm.run("snapshots", "rm", f"{MODEL},ctx=640").check()


def test_killed_build_is_no_lasting_failure(warm):
    process = warm.popen("warm", MODEL, "--ctx", "768")
    while not process.stderr.readline().startswith(STAGES[0]):
        pass
    parked = next(pid for pid in descendants(process.pid) if b"snapshots.parked" in command_line(pid))
    os.kill(parked, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert "the process that loaded the model was killed" in err
    assert list(warm.snapshots.glob(".*.failed")) == []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


WITHOUT_ASKING_FOR_ROOM = """
import sys
from edgeinfer.cli.main import main
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots import registry
jobs.refuse_full = lambda *_: None
registry.make_room = lambda *_, **__: []
sys.exit(main())
"""


@pytest.mark.parametrize("size", ["24m", "120m"])
def test_a_full_disk_while_dumping_or_baking_leaves_nothing(user, size):
    with small_disk(user, size):
        outcome = user.run("warm", MODEL, "--quiet", program=WITHOUT_ASKING_FOR_ROOM)
        assert outcome.code != 0
        assert "is full" in outcome.err or "No space" in outcome.err
        assert folders(user) == set()


def test_too_little_room_is_said_before_anything_is_done(user):
    with small_disk(user, "120m"):  # smaller than the space that must stay free
        outcome = user.run("warm", MODEL, "--quiet")
        assert outcome.code == 6
        assert "stay free" in outcome.err


@pytest.mark.parametrize(
    "name", ["memory.img", "images/pages-1.img", "images/files.img", "images/inventory.img"]
)
def test_a_truncated_file_is_refused_at_launch(snapshot_to_spoil, name):
    person, folder = snapshot_to_spoil
    with open(folder / name, "r+b") as file:
        file.truncate((folder / name).stat().st_size - 1)
    outcome = person.ask()
    assert outcome.start["how"] == "cold"
    assert name in outcome.err


@pytest.mark.parametrize("name", ["memory.img", "images/pages-1.img", "images/core-30000.img"])
def test_a_flipped_bit_is_found_by_verify(snapshot_to_spoil, name):
    person, folder = snapshot_to_spoil
    flip_bit(folder / name, (folder / name).stat().st_size // 2)
    outcome = person.run("snapshots", "verify", MODEL)
    assert outcome.code == 7
    assert name in outcome.err


def test_images_that_criu_refuses_fall_back_to_a_cold_start(snapshot_to_spoil):
    person, folder = snapshot_to_spoil
    flip_bit(folder / "images/inventory.img", 1)
    outcome = person.ask()
    assert outcome.start["how"] == "cold"
    assert "CRIU could not restore" in outcome.err
    assert person.ask("--resume=always").code == 7


def test_a_model_replaced_by_one_of_the_same_size_is_refused(snapshot_to_spoil):
    person, _ = snapshot_to_spoil
    before = os.stat(person.model)
    os.utime(person.model, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        not_resumed(person, f"{person.model} was changed after the snapshot")
    finally:
        os.utime(person.model, ns=(before.st_atime_ns, before.st_mtime_ns))


def not_resumed(person, message: str) -> None:
    outcome = person.ask("--resume=always")
    assert (outcome.code, message in outcome.err) == (7, True), outcome.err


def test_folders_and_files_others_could_write_are_refused(snapshot_to_spoil):
    person, folder = snapshot_to_spoil
    for path in (folder, folder / "manifest", folder / "images/pages-1.img", person.snapshots):
        mode = path.stat().st_mode & 0o777
        path.chmod(mode | 0o020)
        not_resumed(person, "other users may access")
        path.chmod(mode)
    assert person.ask("--resume=always").start["how"] == "resumed"


def test_a_symlink_is_refused(snapshot_to_spoil):
    person, folder = snapshot_to_spoil
    moved = folder.with_name("elsewhere")
    folder.rename(moved)
    folder.symlink_to(moved)
    try:
        not_resumed(person, "not a symlink")
    finally:
        folder.unlink()
        moved.rename(folder)


def test_file_of_another_user_is_refused(snapshot_to_spoil):
    person, folder = snapshot_to_spoil
    if os.getuid() != 0:
        pytest.skip("chown needs root")
    os.chown(folder / "memory.img", 12345, -1)
    not_resumed(person, "belongs to user 12345")


def test_rewarming_leaves_a_running_process_alone_and_serves_the_next(warm):
    before = warm.snapshot()
    running = warm.popen("run", MODEL, "--max-tokens", "20", "--json", stdin=subprocess.PIPE)
    warm.run("warm", MODEL, "--quiet").check()
    assert warm.snapshot() != before
    assert not before.exists()
    assert running.poll() is None
    assert warm.ask().start["how"] == "resumed"
    out, err = running.communicate("Name three colours.", timeout=60)
    assert running.returncode == 0, err
    assert json.loads(out)["result"]["start"]["how"] == "resumed"


@pytest.mark.needs("time")
def test_two_warms_and_a_launch_at_once(warm):
    both = [warm.popen("warm", MODEL, "--quiet") for _ in range(2)]
    assert warm.ask().start["how"] == "resumed"
    for process in both:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert len(list(warm.snapshots.glob(f"{MODEL}@*"))) == 1
    assert warm.ask().start["how"] == "resumed"


@pytest.mark.parametrize("offset_s", [-1000, 1_000_000])
def test_a_monotonic_clock_that_went_back_or_far_ahead_does_not_matter(warm, offset_s):
    """Change the clock as a reboot does, in a time namespace, which only root may create."""
    if os.getuid() != 0:
        pytest.skip("a time namespace needs root")
    if time.monotonic() + offset_s < 0:
        pytest.skip("this machine was booted just now")
    inside = ["unshare", "--time", f"--monotonic={offset_s}", "--fork"]
    inside += ["setpriv", f"--reuid={warm.uid}", f"--regid={warm.gid}"]
    program = "import sys; from edgeinfer.launcher import main; sys.exit(main())"
    command = ["run", MODEL, "Hello", "--max-tokens", "3", "--json"]
    inside += ["--clear-groups", warm.place.python, "-c", program, *command]
    done = run(*inside, env=warm.environment, cwd=warm.home, stdin=subprocess.DEVNULL)
    assert json.loads(done.stdout)["result"]["usage"]["completion_tokens"] == 3


OLD = "echo Version: 3.17.1"
BROKEN = '[ "$1" = --version ] && { echo Version: 4.1; exit; }\necho "Error no" >&2\nexit 1'


@pytest.mark.parametrize(
    ("script", "message"),
    [(None, "version unknown"), ("exit 1", "unknown"), (OLD, "3.17.1"), (BROKEN, "could not dump")],
)
def test_warm_without_a_criu_that_works_says_so_and_leaves_nothing(user, script, message):
    criu = user.home / "criu"
    if script is not None:
        criu.write_text(f"#!/bin/sh\n{script}\n")
        criu.chmod(0o755)
    outcome = user.run("warm", MODEL, "--quiet", env={"EDGEINFER_CRIU": str(criu)})
    assert outcome.code == 7
    assert message in outcome.err
    assert "hint:" in outcome.err
    assert folders(user) == set()


def test_a_criu_that_is_gone_at_launch_makes_it_cold(snapshot_to_spoil):
    person, folder = snapshot_to_spoil
    manifest = folder / "manifest"
    manifest.write_text(manifest.read_text().replace(person.place.criu, "/nonexistent/criu"))
    outcome = person.ask()
    assert outcome.start["how"] == "cold"
    assert "/nonexistent/criu" in outcome.err


WITHOUT_NAMESPACES = """
import os, sys
from edgeinfer.platform import linux
pid = linux.clone(linux.CLONE_NEWUSER)
if pid == 0:
    linux.map_this_user({uid}, {gid})
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    linux.drop_privileges()
    from edgeinfer.launcher import main
    sys.exit(main())
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
"""


def test_user_namespaces_switched_off(user):
    """Forbid user namespaces in a namespace of the test."""
    user.run("warm", MODEL, "--quiet").check()
    program = WITHOUT_NAMESPACES.format(uid=user.uid, gid=user.gid)
    outcome = user.ask(program=program)
    assert outcome.start["how"] == "cold"
    assert outcome.err.count("\n") == 1
    refused = user.run("warm", MODEL, "--quiet", program=program)
    assert refused.code == 7
    assert "namespaces" in refused.err


WHERE_NAMESPACES_ARE_REFUSED = """
import sys
from edgeinfer.snapshot_format import criu
criu.namespaces_refused = lambda tier: "they are switched off"
from edgeinfer.launcher import main
sys.exit(main())
"""
#: The extended attribute that `setcap` writes for criu.FILE_CAPABILITIES.
CAPABILITIES = sum(1 << number for number in (40, 21, 19, 8))
XATTR = struct.pack("<IIIII", 0x02000001, CAPABILITIES & 0xFFFFFFFF, 0, CAPABILITIES >> 32, 0)


def test_file_capabilities_on_criu_do_where_namespaces_are_refused(user, tmp_path_factory):
    if os.getuid() != 0:
        pytest.skip("giving a file capabilities needs root")
    recent = [path for path in candidates() if version_of(path) >= MINIMUM]
    alone = [path for path in recent if b"$ORIGIN" not in Path(path).read_bytes()]
    if not alone:
        pytest.skip(
            "every criu here finds its libraries next to it, which a program with capabilities may not"
        )
    able = user.place.folder / "able-criu"
    shutil.copy(alone[0], able)
    able.chmod(0o755)
    try:
        os.setxattr(able, "security.capability", XATTR)
    except OSError:
        pytest.skip("this file system keeps no capabilities")
    user.environment["EDGEINFER_CRIU"] = str(able)
    result = user.run("warm", MODEL, "--quiet", "--json", program=WHERE_NAMESPACES_ARE_REFUSED).result
    assert result["snapshot"]["tier"] == "capabilities"
    assert user.ask().start["how"] == "resumed"
