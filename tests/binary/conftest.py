"""The shipped file in a bare root (`bare.py`): the oldest libc it promises to start on, nothing else.

EDGEINFER_BINARY names a file built already; otherwise dist/edgeinfer is taken while it is newer than
every source it is made of, and built first when it is not.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
from other_processes import run

from ..conftest import BUILD_CACHE
from ..models.conftest import server as server

ROOT = Path(__file__).parents[2]
BARE = Path(__file__).with_name("bare.py")
HOME = "/home/user"
PROGRAM = "/usr/local/bin/edgeinfer"
MODEL = "smollm2-135m-instruct"
UID = 1000


def pytest_collection_modifyitems(items):
    for item in items:
        if "binary" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def binary() -> Path:
    named = os.environ.get("EDGEINFER_BINARY")
    if named:
        return Path(named)
    built = ROOT / "dist/edgeinfer"
    source_files = (p for folder in ("edgeinfer", "build") for p in (ROOT / folder).rglob("*"))
    sources = [p for p in source_files if p.suffix not in (".pyc", "")]
    if not built.exists() or built.stat().st_mtime < max(p.stat().st_mtime for p in sources):
        command = [sys.executable, ROOT / "build/release.py"]
        build = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        print(build.stderr, file=sys.stderr)
        if "apt-get install libpython" in build.stderr:
            pytest.skip(f"make binary: {build.stderr.strip()}")
        build.check_returncode()
    return built


def floor_libc(root: Path) -> None:
    """Put Debian 11's glibc, 2.31, into a root."""
    fetched = BUILD_CACHE / "glibc-2.31"
    if not fetched.is_dir():
        pytest.skip("glibc 2.31 is not here: scripts/setup.sh test-all fetches it where apt is")
    shutil.copytree(fetched, root, symlinks=True, dirs_exist_ok=True)


def own_libc(root: Path) -> None:
    """Put this machine's libc into a root: the libraries of the package libc6."""
    listed = run("dpkg", "-L", "libc6").stdout.split()
    libraries = [f for f in listed if ".so" in f and "gconv" not in f and os.path.isfile(f)]
    for file in [*libraries, "/lib64/ld-linux-x86-64.so.2"]:
        (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file[1:])


class Machine:
    """A bare root and how to run something in it."""

    def __init__(self, folder: Path, binary: Path, libc: Callable[[Path], None] = floor_libc) -> None:
        self.root = folder
        for name in ("tmp", "etc", "usr/local/bin", HOME[1:]):
            (folder / name).mkdir(parents=True, exist_ok=True)
        libc(folder)
        uid = os.geteuid() or UID  # an ordinary user keeps the own one (`bare.py`)
        (folder / "etc/passwd").write_text(f"user:x:{uid}:{uid}::{HOME}:/bin/sh\n")
        (folder / "etc/hosts").write_text("127.0.0.1 localhost\n")
        (folder / "tmp").chmod(0o1777)
        self.home = folder / HOME[1:]
        self.install(binary)
        config = self.home / ".config/edgeinfer/config.toml"
        config.parent.mkdir(parents=True)
        config.write_text("[snapshots]\nauto-warm = false # nothing goes on behind a test's back\n")
        for path in (self.home, *self.home.rglob("*")):
            self.own(path)

    def install(self, binary: Path) -> None:
        """Put the shipped file in place as an update does: beside, then by a rename."""
        scratch = self.root / "usr/local/bin/.new"
        shutil.copy(binary, scratch)
        scratch.rename(self.root / PROGRAM[1:])

    def own(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, UID, UID)

    def command(self, *args: str, options: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, str(BARE), str(self.root), *options, "--", PROGRAM, *args]

    def environment(self, **more: str | None) -> dict[str, str]:
        """Return the user's environment; None leaves a variable out."""
        usual = {"HOME": HOME, "LANG": "C.UTF-8", "TERM": "xterm-256color", "PATH": "/usr/local/bin"}
        return {name: value for name, value in (usual | more).items() if value is not None}

    def run(
        self, *args: str, options: tuple[str, ...] = (), check: bool = True, **more: str | None
    ) -> subprocess.CompletedProcess[str]:
        return run(
            *self.command(*args, options=options),
            check=check,
            env=self.environment(**more),
            errors="backslashreplace",  # a path may be anything
            stdin=subprocess.DEVNULL,
        )

    def json(self, *args: str, **more: str):
        """Return the result of a verb run with --json."""
        document = json.loads(self.run(*args, "--json", **more).stdout.splitlines()[-1])
        return document.get("result", document)

    def start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True}
        return subprocess.Popen(self.command(*args), env=self.environment(**more), **streams)

    def on_a_terminal(self, *args: str, **settings) -> pexpect.spawn:
        program, *arguments = self.command(*args)
        usual = {"env": self.environment(), "timeout": 120, "encoding": "utf-8"}
        return pexpect.spawn(program, arguments, **usual, **settings)

    @property
    def apps(self) -> list[str]:
        """Everything in the folder of unpacked applications but its lock."""
        folder = self.home / ".local/share/edgeinfer/app"
        return sorted(p.name for p in folder.iterdir() if p.name != ".lock") if folder.is_dir() else []


@pytest.fixture
def machine(tmp_path, binary) -> Machine:
    """A machine that has never seen edgeinfer."""
    return Machine(tmp_path / "root", binary)


@pytest.fixture(scope="session")
def used(tmp_path_factory, binary, smollm2) -> Machine:
    """A machine on which the application is unpacked and the small model is pulled from a file."""
    machine = Machine(tmp_path_factory.mktemp("used") / "root", binary)
    shutil.copy(smollm2, machine.root / "tmp/small.gguf")
    (machine.root / "tmp/small.gguf").chmod(0o644)
    machine.run("pull", "/tmp/small.gguf", "--name", MODEL)
    return machine


@pytest.fixture(scope="session")
def modern(tmp_path_factory, binary) -> Machine:
    """A machine with this one's libc, on which drivers of this one's distribution run."""
    return Machine(tmp_path_factory.mktemp("modern") / "root", binary, own_libc)


@pytest.fixture(scope="session")
def warm(used) -> Machine:
    """The same, with a snapshot of the model."""
    used.run("warm", MODEL)
    return used
