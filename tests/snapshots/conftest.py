"""Fixtures of real snapshots of the small model, as an ordinary user and as root.

Root's tests may run from a folder that an ordinary user cannot enter, so the sources, and if necessary
the virtual environment, are copied to a place that every user can read.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from other_processes import descendants, engines_below, free_port, has_ended, wait_until

from edgeinfer.snapshot_format import fingerprint, storage
from edgeinfer.snapshot_format.criu import probe
from edgeinfer.snapshot_format.storage import Manifest

from ..conftest import one_process_at_a_time, without_other_tests

REPOSITORY = Path(__file__).parents[2]
USER = "edgeinfer-test"
MODEL = "small"
NO_AUTO_WARM = "[snapshots]\nauto-warm = false\n"
ASK_RESUMED = """
import sys
from edgeinfer.launcher import selection
from edgeinfer.snapshots.restore import checks
{before}
folder, manifest = selection.find(sys.argv[1], {{}})
print(checks.ask_resumed_process(manifest, folder, sys.argv[2]).hex())
"""


def manifest(**fields: object) -> Manifest:
    made = Manifest(
        name="m", model="m", criu="/criu", tier="root", pid=30000, link_inode=1, wake_inode=2
    )
    vars(made).update(fields)
    return made


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    folder = tmp_path / "cache/snapshots"
    folder.mkdir(parents=True, mode=0o700)
    for path in (folder, folder.parent):
        path.chmod(0o700)
    return folder


def folder_of(name, generation, program=""):
    """Return the name of a snapshot's folder; `program` is another installation's tag."""
    return storage.folder_name(name, generation, program or fingerprint.program_tag())


def publish(root, name, generation=1, *, size=4096, program="", keys=(), **fields):
    """Write a snapshot that a launch accepts; `program` is the path of another installation."""
    folder = root / folder_of(name, generation, program and storage.short_hash(program))
    (folder / storage.IMAGES).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    files, images = {sys.executable: fingerprint.stamp(sys.executable)}, {storage.MEMORY: size}
    all_keys = fingerprint.machine_keys() | dict(keys) | ({"program": program} if program else {})
    document = manifest(name=name, keys=all_keys, files=files, images=images, **fields)
    text = storage.manifest_text(document).encode()
    contents = {storage.MEMORY: bytes(size), storage.MANIFEST: text, storage.LOCK: b""}
    for file, content in contents.items():
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o600)
    return folder


def _is_world_accessible(path: Path) -> bool:
    return all(p.stat().st_mode & 0o001 for p in (path, *path.parents))


def _world_accessible_copy(folder: Path, sources: Path) -> Path:
    """Copy the virtual environment, so that it imports `sources` and finds its CRIU."""
    target = folder / "venv"
    shutil.copytree(sys.prefix, target, symlinks=True)
    for installed in target.glob("lib/python*/site-packages/__editable__.edgeinfer-*.pth"):
        installed.write_text(f"{sources}\n")
    criu = target / "criu/bin/criu"
    if criu.exists():
        from edgeinfer.shipping.payload import relocate

        interpreter = next((target / "criu/lib").glob("ld-linux*"))
        criu.write_bytes(relocate(criu.read_bytes(), str(interpreter)))
    return target


class Place:
    """Where the tested program is, and how to run it as a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "sources"
        # including compiled modules
        shutil.copytree(REPOSITORY / "edgeinfer", self.sources / "edgeinfer")
        self.prefix = Path(sys.prefix)
        if not _is_world_accessible(self.prefix):
            self.prefix = _world_accessible_copy(folder, self.sources)
        self.python = self.prefix / "bin/python"
        self.criu = probe().criu.replace(sys.prefix, str(self.prefix))
        self.script = folder / "bin/edgeinfer"
        self.script.parent.mkdir()
        self.script.write_text("import sys\nfrom edgeinfer.launcher import main\nsys.exit(main())\n")
        subprocess.run([self.python, "-m", "compileall", "-q", self.sources], check=True)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)


_started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _close_pipes():
    """Close the pipes of a test's processes at its end, before another test collects them."""
    yield
    while _started:
        process = _started.pop()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and process.poll() is not None:
                pipe.close()


class Person:
    """A user of edgeinfer with a home, in which the small model is pulled."""

    def __init__(
        self, place: Place, uid: int, gid: int, home: Path, model: Path, *, pulls: bool = True
    ) -> None:
        self.place = place
        self.uid = uid
        self.gid = gid
        self.home = home
        self.data = home / "ei"
        self.model = model
        home.mkdir(mode=0o755, exist_ok=True)
        os.chown(home, uid, gid)
        self.environment = {
            "HOME": str(home),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(place.sources),
            "EDGEINFER_HOME": str(self.data),
            "EDGEINFER_CRIU": place.criu,
        }
        if pulls:
            self.run("pull", str(model), "--name", MODEL, "--in-place", "--quiet").check()
        else:
            self.data.mkdir(mode=0o700)
            os.chown(self.data, uid, gid)

    @property
    def snapshots(self) -> Path:
        return self.data / "cache/snapshots"

    def snapshot(self, name: str = MODEL) -> Path:
        """The folder of the newest snapshot of that name."""
        return max(p for p in self.snapshots.glob(f"{name}@*") if (p / "manifest").exists())

    def settings(self, text: str) -> None:
        """Write config.toml."""
        folder = self.data / "config"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(text)

    def popen(self, *arguments: str, program: str = "", **settings) -> subprocess.Popen:
        """Start edgeinfer, or the Python code in `program`, as this user."""
        start = ["-c", program] if program else [str(self.place.script)]
        environment = self.environment | settings.pop("env", {})
        defaults: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.home,
        }
        if os.getuid() == 0:  # otherwise this is the user already, who may not set groups
            defaults |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        command = [str(self.place.python), *start, *arguments]
        settings = {"start_new_session": True, "text": True} | defaults | settings
        process = subprocess.Popen(command, env=environment, **settings)
        _started.append(process)
        return process

    def run(self, *arguments: str, timeout: float = 120, **settings) -> Outcome:
        process = self.popen(*arguments, **settings)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Outcome(process.returncode, out, err)

    def logged(self, message: str) -> str:
        """Wait until the log of background builds contains `message`; return the log."""
        log = self.data / "state/auto-warm.log"
        with without_other_tests():
            wait_until(
                lambda: log.exists() and message in log.read_text(), f"{message!r} in {log}", 120
            )
        return log.read_text()

    def ask_resumed(self, role: str, model: str = MODEL, before: str = "") -> bytes:
        """Return a resumed process's answer to "canary" or "facts"; `before` is code that runs first."""
        program = ASK_RESUMED.format(before=before)
        return bytes.fromhex(self.run(model, role, program=program).check().out)

    def ask(self, *arguments: str, **settings) -> Outcome:
        """Run a short greedy request with the small model."""
        options = "--max-tokens 6 --temperature 0 --json".split()
        return self.run("run", MODEL, "Name three colours.", *options, *arguments, **settings)


class Outcome:
    """Result of a run."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def check(self) -> Outcome:
        assert self.code == 0, (self.code, self.out, self.err)
        return self

    @property
    def result(self) -> dict:
        return json.loads(self.check().out)["result"]

    @property
    def start(self) -> dict:
        return self.result["start"]

    @property
    def error(self) -> dict:
        """Return the error of a failed run with `--json`."""
        return json.loads(self.out)["error"]


class Endpoint:
    """A running `serve`, with a client that opens a connection for each request."""

    def __init__(self, person: Person, *arguments: str, **settings) -> None:
        self.port = free_port()
        self.log = person.home / "serve.log"
        with open(self.log, "wb") as log:
            self.process = person.popen(
                "serve", *arguments, "--port", str(self.port), stderr=log, stdout=log, **settings
            )
        limits = httpx2.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=url, timeout=300, limits=limits)

    def ask(self, model: str = MODEL, tokens: int = 3) -> dict:
        """Return one completion; once the endpoint has started, no connection may be refused."""
        return self.post({"model": model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0})

    def post(self, body: dict, status: int = 200) -> dict:
        """Return the answer to a completion request."""
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.client.get("/health").is_success
        except httpx2.TransportError:
            return False

    @property
    def props(self) -> dict:
        """Ask `/props` about the only model."""
        (model,) = self.client.get("/props").json()["models"]
        return model

    def apps(self) -> list[int]:
        """The pids of the apps, the verb's first."""
        return engines_below(self.process.pid)

    def kill_app(self) -> int:
        """Kill the verb's app, and return its pid once it has ended."""
        app = self.apps()[0]
        os.kill(app, signal.SIGKILL)
        wait_until(lambda: has_ended(app), "the app to end")
        return app

    def __enter__(self):
        wait_until(self._is_ready, "the endpoint")
        return self

    def __exit__(self, *_):
        below = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.client.close()
        wait_until(lambda: all(map(has_ended, below)), "every process to end")


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Place:
    probed = probe()
    if probed.tier is None:
        pytest.skip(f"snapshots do not work here: {probed.reason}")
    folder = Path("/var/tmp") / f"edgeinfer-tests-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield Place(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _ordinary_user() -> tuple[int, int]:
    with one_process_at_a_time("user"):
        try:
            entry = pwd.getpwnam(USER)
        except KeyError:
            subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", USER], check=True)
            entry = pwd.getpwnam(USER)
    return entry.pw_uid, entry.pw_gid


@pytest.fixture(scope="session", params=["ordinary user", "root"])
def anybody(request, place, smollm2) -> Person:
    """An ordinary user, then root, with the small model and no snapshot."""
    if os.getuid() != 0 and request.param == "root":
        pytest.skip("not root")
    if os.getuid() == 0 and request.param == "root":
        return Person(place, 0, 0, place.folder / "root", _readable(place, smollm2))
    return _user(place, smollm2, "user")


def _user(place: Place, smollm2: Path, home: str, *, pulls: bool = True) -> Person:
    uid, gid = _ordinary_user() if os.getuid() == 0 else (os.getuid(), os.getgid())
    return Person(place, uid, gid, place.folder / home, _readable(place, smollm2), pulls=pulls)


def _readable(place: Place, model: Path) -> Path:
    copy = place.folder / model.name
    if not copy.exists():
        shutil.copy(model, copy)
        copy.chmod(0o644)
    return copy


@pytest.fixture(scope="session")
def warm(anybody) -> Person:
    """A user with a snapshot of the small model, which tests must leave as it is."""
    anybody.settings(NO_AUTO_WARM)
    anybody.run("warm", MODEL, "--quiet").check()
    return anybody


@pytest.fixture
def user(place, smollm2, tmp_path_factory) -> Person:
    """An ordinary user with an empty home."""
    return _user(place, smollm2, f"user-{tmp_path_factory.mktemp('u').name}")


@pytest.fixture
def abroad(place, smollm2, tmp_path_factory) -> Person:
    """A user with another home and another path of the program, without a model."""
    person = _user(place, smollm2, f"abroad-{tmp_path_factory.mktemp('a').name}", pulls=False)
    elsewhere = person.home / "program"
    shutil.copytree(place.sources, elsewhere)
    person.environment["PYTHONPATH"] = str(elsewhere)
    person.settings(NO_AUTO_WARM)
    return person


@contextmanager
def small_disk(person, size: str) -> Iterator[None]:
    """Mount a file system of this size as the folder of snapshots; only root can."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    folder = person.data / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, person.uid, person.gid)
    options = f"size={size},mode=0755,uid={person.uid}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
