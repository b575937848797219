"""scripts/setup.sh: what it says before it compiles where it cannot go on, and how it ends."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from other_processes import has_ended, wait_until

from ..conftest import ROOT

pytestmark = pytest.mark.slow  # starts programs
_PROGRAMS = "awk bash cat cksum cmake cut date df dirname env flock g++ gcc grep head ldd ls make mkdir printf python3"
_PROGRAMS += " realpath rm sed setsid sh sleep tail tee uname"


def start_set_up(
    tmp_path: Path, without: str = "", mode: str = "run", **environment: str
) -> subprocess.Popen[str]:
    """Start the set-up of a bare checkout on a machine with the usual programs, but without git."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "scripts", checkout / "scripts", dirs_exist_ok=True)
    if not (checkout / "requirements").exists():
        shutil.copytree(ROOT / "requirements", checkout / "requirements")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    programs.mkdir(exist_ok=True)
    for name in set(_PROGRAMS.split()) - set(without.split()):
        if program := shutil.which(name):
            (programs / name).symlink_to(program)
    command = ["scripts/setup.sh", mode]
    environment = {"PATH": str(programs), "HOME": str(tmp_path), **environment}
    return subprocess.Popen(command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True)


def read_error(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a set-up that fails; return what it says, line by line, without its progress."""
    _, stderr = process.communicate(timeout=280)
    assert process.returncode == 1, stderr
    return [line for line in stderr.splitlines() if line and not line.startswith("setup:")]


def replace_pip(tmp_path: Path, script: str) -> Path:
    """Make the checkout's virtual environment, with `script` as pip; return the file `$pids` of it."""
    programs = tmp_path / "checkout/.venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    (programs / "pip").write_text(f"#!/bin/sh\npids={tmp_path}/pids\n{script}")
    (programs / "pip").chmod(0o755)
    return tmp_path / "pids"


def test_missing_compilers_are_named_with_their_packages(tmp_path: Path) -> None:
    error, hint = read_error(start_set_up(tmp_path, without="cmake g++"))
    assert error == "error: g++ cmake missing: llama.cpp cannot be compiled"
    assert hint == "hint: apt-get install build-essential cmake python3-venv"


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_virtual_environment_that_cannot_be_made_ends_it_with_the_reason(tmp_path: Path) -> None:
    fails = write_program(tmp_path / "python", '[ "$1" = -m ] && echo no room >&2 && exit 1; echo True')
    for _ in range(2):  # what the first one left does not pass for an environment
        error, hint = read_error(start_set_up(tmp_path, mode="lint", PYTHON=str(fails)))
        assert error == "error: no virtual environment in .venv: no room"
        assert "PYTHON=FILE" in hint
        shutil.rmtree(tmp_path / "bin")


def test_virtual_environment_that_cannot_be_removed_is_not_used(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/rm", "echo \"rm: '.venv': Device or resource busy\" >&2; exit 1")
    error, _ = read_error(start_set_up(tmp_path, without="rm", mode="lint"))
    assert error == "error: no virtual environment in .venv: rm: '.venv': Device or resource busy"


def test_program_that_is_not_python_is_refused(tmp_path: Path) -> None:
    error, _ = read_error(start_set_up(tmp_path, mode="lint", PYTHON=shutil.which("true") or ""))
    assert error == "error: no Python 3.11 to 3.14 with venv"


@pytest.mark.needs("time")
def test_settings_of_another_environment_do_not_lead_out_of_this_one(tmp_path: Path) -> None:
    requirements, wheel_path = tmp_path / "checkout/requirements", tmp_path / "ruff-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        wheel.writestr("ruff-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: ruff\nVersion: 1\n")
        wheel.writestr("ruff-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("ruff-1.dist-info/entry_points.txt", "[console_scripts]\nruff = ruff:main\n")
        wheel.writestr("ruff-1.dist-info/RECORD", "")
    requirements.mkdir(parents=True)
    digest = hashlib.sha256(wheel_path.read_bytes()).hexdigest()
    (requirements / "tools.txt").write_text(f"ruff==1 --hash=sha256:{digest}\n")
    (requirements / "dev.txt").touch()
    (tmp_path / "pip.conf").write_text(f"[install]\nuser = true\n[global]\nfind-links = {tmp_path}\n")
    (tmp_path / "scripts").mkdir()  # where CDPATH leads
    (tmp_path / "venv.py").touch()  # where PYTHONPATH leads
    variables = "CDPATH PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON".split()
    settings = dict.fromkeys(variables, str(tmp_path)) | dict.fromkeys(["PIP_USER", "PIP_DRY_RUN"], "1")
    settings |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_NO_INDEX": "1"}  # an index is kept
    process = start_set_up(tmp_path, mode="lint", **settings)
    _, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    assert (tmp_path / "checkout/.venv/bin/ruff").exists()


def test_packages_that_pip_puts_elsewhere_leave_no_stamp(tmp_path: Path) -> None:
    replace_pip(tmp_path, "exit 0")  # as with `target = FOLDER` in pip.conf
    error, hint = read_error(start_set_up(tmp_path, mode="lint"))
    assert error == "error: pip has installed the packages elsewhere, not in .venv"
    assert "pip config list" in hint
    assert not (tmp_path / "checkout/.venv/.packages").exists()


@pytest.mark.parametrize("mode", ["lint", "run"])
def test_unsupported_python_is_refused(tmp_path: Path, mode: str) -> None:
    too_new = tmp_path / "python3.99"
    script = f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 99); $2"\n'
    too_new.write_text(script)
    too_new.chmod(0o755)
    error, hint = read_error(start_set_up(tmp_path, mode=mode, PYTHON=str(too_new)))
    assert error == "error: no Python 3.11 to 3.14 with venv"
    assert "PYTHON=FILE names one" in hint


@pytest.mark.parametrize("variable", ["EDGEINFER_BUILD_CACHE", "EDGEINFER_HOME"])
def test_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path, variable: str) -> None:
    error, hint = read_error(start_set_up(tmp_path, **{variable: "/proc/none"}))
    assert error == "error: /proc/none cannot be written"
    assert hint == f"hint: HOME=FOLDER or {variable}=FOLDER names another folder"


def test_full_disk_is_seen_before_anything_is_made(tmp_path: Path) -> None:
    df = tmp_path / "bin/df"
    df.parent.mkdir()
    df.write_text("#!/bin/sh\necho Filesystem 1M-blocks Used Available\necho /dev/x 9999 9900 99\n")
    df.chmod(0o755)
    error, _ = read_error(start_set_up(tmp_path, without="df"))
    assert error == f"error: less than 1500 MB are free in {tmp_path}/checkout"
    assert not (tmp_path / "checkout/.venv").exists()


@pytest.mark.needs("time")
@pytest.mark.parametrize("mode", ["lint", "run"])
def test_packages_that_cannot_be_had_end_it_with_one_sentence(tmp_path: Path, mode: str) -> None:
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:1", "PIP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    nowhere["PIP_CONFIG_FILE"] = os.devnull
    error, hint = read_error(start_set_up(tmp_path, mode=mode, **nowhere))
    assert error.startswith("error: pip: ERROR: ")
    assert "HTTPS_PROXY names a proxy" in hint


@pytest.mark.needs("time")
def test_proxy_that_never_answers_ends_it_after_four_tries(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        pip = {"PIP_DEFAULT_TIMEOUT": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        process = start_set_up(tmp_path, mode="lint", HTTPS_PROXY=address, **pip)
        assert read_error(process)[0] == "error: pip: cannot reach the package index"
        for _ in range(4):  # pip's own update is tried once, the first package three times
            proxy.accept()[0].close()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_installer_that_fails_in_the_background_ends_all_at_once(tmp_path: Path) -> None:
    pids = replace_pip(
        tmp_path,
        'if [ "$1" = download ]; then echo $$ >>"$pids"; exec sleep 600; fi\n'
        'while [ ! -s "$pids" ]; do sleep 0.01; done\n'
        'echo "ERROR: no such package"; exit 1\n',
    )
    error, _ = read_error(start_set_up(tmp_path))
    assert error == "error: pip: ERROR: no such package"
    wait_until(lambda: has_ended(int(pids.read_text())), "the download to be ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_that_the_set_up_started(tmp_path: Path, number: signal.Signals) -> None:
    pids = replace_pip(tmp_path, 'echo $$ >>"$pids"; exec sleep 600\n')
    process = start_set_up(tmp_path)
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "both pips to be started")
    process.send_signal(number)
    assert process.wait(60) == 130
    started = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: all(map(has_ended, started)), "both pips to be ended")
    process.communicate()
