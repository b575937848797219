"""What scripts/setup.sh says, before it compiles, of a machine on which it cannot go on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ..conftest import ROOT

pytestmark = pytest.mark.slow  # starts programs
_PROGRAMS = "awk bash cat cksum cmake cut date df dirname env flock g++ gcc grep head ldd ls make mkdir printf python3 realpath rm sed tail uname"


def set_up(tmp_path: Path, without: str = "", mode: str = "run", **environment: str) -> list[str]:
    """Set up a bare checkout, in vain; return what is said, line by line."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "scripts", checkout / "scripts", dirs_exist_ok=True)
    shutil.copytree(ROOT / "requirements", checkout / "requirements", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    programs.mkdir(exist_ok=True)
    for name in set(_PROGRAMS.split()) - set(without.split()):
        if program := shutil.which(name):
            (programs / name).symlink_to(program)
    done = subprocess.run(
        [checkout / "scripts/setup.sh", mode],
        env={"PATH": str(programs), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1, done.stderr
    assert not (checkout / ".venv/bin/edgeinfer").exists()
    return [line for line in done.stderr.splitlines() if line and not line.startswith("setup:")]


def test_missing_compilers_are_named_with_their_packages(tmp_path: Path) -> None:
    error, hint = set_up(tmp_path, without="cmake g++")
    assert error == "error: g++ cmake missing: llama.cpp cannot be compiled"
    assert hint == "hint: apt-get install build-essential cmake"


def test_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    error, hint = set_up(tmp_path, EDGEINFER_BUILD_CACHE="/proc/none")
    assert error == "error: /proc/none cannot be written"
    assert "EDGEINFER_BUILD_CACHE=FOLDER" in hint


def test_full_disk_is_seen_before_anything_is_made(tmp_path: Path) -> None:
    df = tmp_path / "bin/df"
    df.parent.mkdir()
    df.write_text("#!/bin/sh\necho Filesystem 1M-blocks Used Available\necho /dev/x 9999 9900 99\n")
    df.chmod(0o755)
    error, _ = set_up(tmp_path, without="df")
    assert error.startswith("error: 99 MB are free in ")
    assert not (tmp_path / "checkout/.venv").exists()


@pytest.mark.needs("time")
@pytest.mark.parametrize("mode", ["lint", "run"])
def test_packages_that_cannot_be_had_end_it_with_one_sentence(tmp_path: Path, mode: str) -> None:
    nowhere = {
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
    }
    error, hint = set_up(tmp_path, mode=mode, **nowhere)
    assert error.startswith("error: pip: ERROR: ")
    assert "HTTPS_PROXY names a proxy" in hint
