"""`edgeinfer backend` against a server of releases, with a stand-in for libcuda.so.1 that only knows its version."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from fake_hub import Fault, sha
from other_processes import limited_files, wait_until

from edgeinfer.errors import CatalogError, DownloadError, EdgeInferError
from edgeinfer.models.fetching import download
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, RetryPolicy
from edgeinfer.models.store import read_record
from edgeinfer.platform import disk
from edgeinfer.platform.ed25519 import new_key_text, parse_key
from edgeinfer.runtime.llama import backend_loading, backends
from edgeinfer.runtime.llama.backends import LibraryFacts
from edgeinfer.shipping import backend_install, update
from edgeinfer.shipping.update import Channel, Release, ReleasedBackend

from ..conftest import ROOT, flip_bit
from ..models.conftest import server as server

sys.path.insert(0, str(ROOT / "build"))
import publish

KEY, STRANGER = (parse_key(new_key_text()) for _ in range(2))
NOW = int(time.time())
RETRIES = RetryPolicy(attempts=3, pause_s=0.001)
#: The command line, with this server's address and key instead of those in data/release.toml.
PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from edgeinfer.cli.main import main
from edgeinfer.cli.verbs import backend, doctor
from edgeinfer.models.store import read_record
from edgeinfer.platform import disk, machine
from edgeinfer.runtime.llama import backends
from edgeinfer.shipping import backend_install, update
backends.has_release_key = lambda: "NO_KEY" not in os.environ
backends._PATIENCE_S = float(os.environ.get("PATIENCE_S", 60))
channel = update.Channel(url=sys.argv[1], keys=(sys.argv[2],))
update.channel = lambda: channel
crash_at = os.environ.get("CRASH_AT")
replace, last = os.replace, {"library": "libggml-cuda.so", "description": "libggml-cuda.json"}.get(crash_at)
os.replace = lambda source, target, **at: Path(target).name == last and os._exit(9) or replace(source, target, **at)
if "CARD" in os.environ:
    machine.read_gpus = lambda: (os.environ["CARD"],)
    backends.shipped_dir = lambda: Path("/nowhere")
if "AS_ANOTHER" in os.environ:  # for the folders only: it may not reach this checkout
    def locked(lock=update.locked):
        ctypes.CDLL(None).setfsuid(65_534)
        return lock()

    update.locked = locked
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders, each with a libcuda.so.1 that reports the CUDA version in the folder's name."""
    folder = tmp_path_factory.mktemp("drivers")
    (folder / "none").mkdir()
    (folder / "none/libcuda.so.1").write_text("no library, but it hides this machine's driver\n" * 9)
    answers = {str(n): f"*version = {n};" for n in (0, 12040, 13000, 13010)}
    failures = {"stub": "return 34;", "unnamed": "raise(40);"}
    failures |= {"crash": "*(volatile int *)0 = 1;", "hang": "for (;;) pause();"}
    for name, code in (answers | failures).items():
        out = folder / name / "libcuda.so.1"
        out.parent.mkdir()
        head = "#include <signal.h>\n#include <unistd.h>\n"
        code = f"{head}int cuDriverGetVersion(int *version) {{ {code} return 0; }}"
        compiler = ["gcc", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", out, "-"]
        subprocess.run(compiler, input=code.encode(), check=True)
    return folder


class Releases:
    """A server with a release of the CUDA backend for the installed llama.cpp."""

    def __init__(self, server, drivers: Path):
        self.server, self.drivers = server, drivers
        self.body = os.urandom(300_000)
        self.library = backends.added_dir() / "libggml-cuda.so"
        self.publish()

    def publish(self, *, key=KEY, name="libggml-cuda-x86_64.so", expires_s=NOW + 86_400, **changes):
        build = msgspec.structs.replace(backend_loading.this_build(), **changes)
        digest, n_bytes = sha(self.body), len(self.body)
        facts = LibraryFacts(name="cuda", build=build, sha256=digest, size_bytes=n_bytes)
        library = ReleasedBackend(name=name, size_bytes=n_bytes, sha256=digest, facts=facts)
        times = {"issued_s": NOW, "expires_s": expires_s}
        release = Release(version="9.9.9", files={}, backends=(library,), **times)
        raw = msgspec.json.encode(release)
        self.server.files |= {
            "/release.json": raw, "/release.json.sig": key.sign(raw), f"/{name}": self.body,
        }  # fmt: skip

    def start(self, *typed: str, driver: object = 13000, **more: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.drivers / str(driver)), **more}
        command = [sys.executable, "-c", PROGRAM, self.server.url, KEY.public.hex(), *typed]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *typed: str, code: int = 0, driver: object = 13000, **more: str):
        """Run `backend` with `--json`; return its result, or its error."""
        process = self.start("backend", *typed, "--json", driver=driver, **more)
        out, err = process.communicate()
        assert process.returncode == code, (out, err)
        body = json.loads(out)
        return body["result"] if "result" in body else body["error"]

    def install(self) -> str:
        """Install in this process."""
        channel = Channel(url=self.server.url, keys=(KEY.public.hex(),))
        return backend_install.install("cuda", channel, Job(retry_policy=RETRIES))

    def refusal(self) -> str:
        """Try to install in this process; return the code of the error."""
        with pytest.raises(EdgeInferError) as caught:
            self.install()
        return caught.value.code

    def is_installed(self) -> bool:
        file = backends.read("cuda", self.library, added=True)
        return not file.problem and self.library.read_bytes() == self.body

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.library.parent.glob("*"))


@pytest.fixture
def releases(server, drivers, monkeypatch) -> Releases:
    """Return a server of releases; this process takes any driver."""
    monkeypatch.setattr(backends, "driver_problem", lambda: None)
    return Releases(server, drivers)


def test_install_list_and_remove(releases):
    cuda, _vulkan = releases.run()["libraries"]
    assert cuda["reason"] == "its library is not installed"
    assert cuda["fix"] == "edgeinfer backend install cuda"
    assert "    → edgeinfer backend install cuda\n" in releases.start("backend").communicate()[0]
    first = releases.run("install", "cuda")
    assert first["message"].startswith("cuda is installed, but does not work here: ")
    assert first["libraries"][0]["name"] == "cuda"
    assert first["libraries"][0]["reason"], "random bytes are no library"
    assert releases.is_installed()
    assert releases.names == ["libggml-cuda.json", "libggml-cuda.so"]
    assert backends.misfit(backends.find("cuda"), backend_loading.this_build()) == ""
    assert (releases.library.stat().st_mode & 0o022) == 0
    assert releases.run("install", "cuda", driver=13010)["message"].startswith("cuda was here already")
    assert len(releases.server.gets("/libggml-cuda-x86_64.so")) == 1
    assert releases.run("list")["libraries"][0]["name"] == "cuda"
    (releases.library.parent / "libggml-cuda.so.bak").write_bytes(b"the user's own")
    (releases.library.parent / "libggml-cuda-mine").mkdir()
    (releases.library.parent / "libggml-cuda-x86_64.so.part").write_bytes(b"fetched")
    (releases.library.parent / ".libggml-cuda.json.0a.new").write_bytes(b"of a process that was killed")
    assert "is removed" in releases.run("remove", "cuda")["message"]
    assert releases.names == ["libggml-cuda-mine", "libggml-cuda.so.bak"]
    assert "no cuda library was added" in releases.run("remove", "cuda", code=2)["message"]


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("none", "there is no NVIDIA driver"),
        (12040, "supports CUDA up to 12.4"),
        (0, "is not a working NVIDIA driver: it has no version (error 0)"),
        ("stub", "is not a working NVIDIA driver: it has no version (error 34)"),
    ],
)
def test_driver_that_cannot_run_it_is_asked_before_the_network(releases, driver, reason):
    error = releases.run("install", "cuda", code=1, driver=driver)
    assert reason in error["message"]
    assert "use Vulkan with your distribution's driver" in error["hint"]
    assert releases.server.seen == []
    assert releases.names == []


def test_offline_mode_refuses_in_a_sentence(releases):
    error = releases.run("install", "cuda", code=4, EDGEINFER_OFFLINE="1")
    assert error["message"].endswith("needs the network, but offline mode is on")
    assert releases.server.seen == []


@pytest.mark.parametrize(
    ("published", "code"),
    [
        ({"key": STRANGER}, "release-untrusted"),
        ({"expires_s": NOW - 1}, "release-untrusted"),
        ({"ggml": "0.0.1"}, "shipping"),
        ({"name": "../libggml-cuda.so"}, "shipping"),
    ],
)
def test_release_that_is_refused_is_not_fetched(releases, published, code):
    releases.publish(**published)
    assert releases.refusal() == code
    assert not any("libggml" in request.path for request in releases.server.seen)
    assert releases.names == []


@pytest.mark.parametrize(
    ("built_for", "hint"),
    [({"machine": "linux-aarch64"}, "use the Vulkan"), ({"ggml": "0.9.0"}, "run `edgeinfer update`")],
)
def test_hint_about_a_missing_library_fits_the_cause(releases, built_for, hint):
    releases.publish(**built_for)
    assert releases.run("install", "cuda", code=1)["hint"].startswith(hint)


@pytest.mark.parametrize("change", ["bit", "short", "long", "empty"])
def test_file_that_was_changed_is_never_in_place(releases, change):
    raw = releases.body
    changed = {"short": raw[:-1], "long": raw + b"x", "empty": b""}
    changed["bit"] = raw[:-1] + bytes([raw[-1] ^ 1])
    releases.server.files["/libggml-cuda-x86_64.so"] = changed[change]
    assert releases.refusal() == "checksum"
    assert not releases.library.exists()
    releases.server.files["/libggml-cuda-x86_64.so"] = raw
    releases.install()
    assert releases.is_installed()


def test_damaged_library_is_replaced_and_a_working_one_outlives_a_failed_install(releases):
    releases.install()
    flip_bit(releases.library, 1000)
    assert "its SHA-256 is not the one" in backends.ask("cuda").reason
    assert releases.install() == "cuda is installed"
    assert releases.is_installed()
    before = releases.body
    releases.body = os.urandom(200_000)
    releases.publish()
    releases.server.files["/libggml-cuda-x86_64.so"] = before[:200_000]
    assert releases.refusal() == "checksum"
    releases.body = before
    assert releases.is_installed()


def test_interrupted_download_goes_on(releases):
    # slow down the third response; the first two are the manifest and its signature
    releases.server.faults.extend([None, None, Fault(pace=4096)])
    process = releases.start("backend", "install", "cuda")
    wait_until(lambda: releases.server.served > 150_000, "half of the library")
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert process.returncode == 130, err
    assert FETCHED_IS_KEPT in err
    assert not releases.library.exists()
    releases.install()
    assert releases.server.gets("/libggml-cuda-x86_64.so")[-1].headers["range"].startswith("bytes=")
    assert releases.is_installed()
    assert releases.names == ["libggml-cuda.json", "libggml-cuda.so"]


@pytest.mark.parametrize(
    ("driver", "ending"),
    [
        ("crash", "ended with SIGSEGV"),
        ("unnamed", "ended with signal 40"),
        ("hang", "took more than 1 s"),
    ],
)
def test_driver_that_crashes_or_hangs_is_a_reason(server, drivers, monkeypatch, driver, ending):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(drivers / driver))
    monkeypatch.setattr(backends, "_PATIENCE_S", 1.0 if driver == "hang" else 120.0)
    problem = backends.driver_problem()
    assert problem.reason == f"the process that loaded it {ending}"
    assert not problem.absent
    with pytest.raises(EdgeInferError, match="nothing was installed: the process that loaded it"):
        Releases(server, drivers).install()
    assert server.seen == []


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


ODD_FILES = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "huge": make_huge,
    "loop": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_whatever_lies_in_the_place_of_a_file_blocks_nothing(releases, kind):
    releases.install()
    library, description = releases.library, backends.facts_path(releases.library)
    seen = library.parent.parent / "update/seen"
    record = library.parent.parent / "models/smollm2-135m-instruct/model.json"
    table = library.parent.parent.parent / "cache/table.json"

    def replace(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        ODD_FILES[kind](path)

    for path in (description, seen, record, table):
        replace(path)
    assert "does not say which llama.cpp" in backends.find("cuda").problem
    assert disk.CacheTable("table.json", dict[str, str]).read() == {}
    with pytest.raises(CatalogError):
        read_record(record.parent)
    assert releases.refusal() == "shipping"
    (seen.rmdir if kind == "folder" else seen.unlink)()
    if kind == "folder":
        assert releases.refusal() == "shipping"
        description.rmdir()
    releases.install()
    assert releases.is_installed()
    replace(library)
    assert all(file.name != "cuda" or file.problem for file in backends.available())
    if kind == "folder":
        assert releases.refusal() == "shipping"
    else:
        releases.install()
        assert releases.is_installed()
    backend_install.remove("cuda")
    assert releases.names == (["libggml-cuda.so"] if kind == "folder" else [])


def test_folder_that_others_may_write_to_gets_no_library(releases):
    releases.library.parent.mkdir(parents=True)
    releases.library.parent.chmod(0o777)
    with pytest.raises(EdgeInferError) as caught:
        releases.install()
    assert f"other users can write to {releases.library.parent}," in caught.value.message
    assert f"chmod go-w {releases.library.parent}" in caught.value.hint
    assert releases.server.seen == []


def test_description_has_the_digest_that_was_signed(releases):
    raw = json.loads(releases.server.files["/release.json"])
    raw["backends"][0]["facts"] |= {"sha256": "0" * 64, "size_bytes": 1}
    changed = json.dumps(raw).encode()
    releases.server.files |= {"/release.json": changed, "/release.json.sig": KEY.sign(changed)}
    releases.install()
    assert backends.find("cuda").facts.sha256 == sha(releases.body)
    assert "SHA-256" not in backends.ask("cuda").reason


def test_file_that_changes_between_download_and_copy_is_never_in_place(releases, monkeypatch):
    fetch = download.fetch

    def fetch_and_change(*arguments):
        partial = fetch(*arguments)
        change = disk.new_file

        def new_file(*more, **at):
            flip_bit(partial, 1000)
            return change(*more, **at)

        monkeypatch.setattr(disk, "new_file", new_file)
        return partial

    monkeypatch.setattr(download, "fetch", fetch_and_change)
    assert releases.refusal() == "checksum"
    assert not releases.library.exists()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_manifest_that_drips_in_has_a_limit(drivers, monkeypatch, head):
    monkeypatch.setattr(backends, "driver_problem", lambda: None)
    monkeypatch.setattr(update, "_MANIFEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection = listener.accept()[0]
            with connection, suppress(OSError):
                connection.sendall(head)
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        channel = Channel(url=f"http://127.0.0.1:{listener.getsockname()[1]}", keys=(KEY.public.hex(),))
        with pytest.raises(DownloadError, match=r"release.json: not complete after 0.5 s"):
            backend_install.install("cuda", channel, Job(retry_policy=RETRIES))
        thread.join()


@pytest.mark.parametrize("step", ["library", "description"])
def test_crash_before_a_step_of_the_publication_leaves_a_refused_pair_at_most(releases, step):
    releases.install()
    older, releases.body = releases.body, os.urandom(len(releases.body))
    releases.publish()
    process = releases.start("backend", "install", "cuda", CRASH_AT=step)
    process.communicate()
    assert process.returncode == 9
    in_place = releases.library.read_bytes()
    assert in_place == (older if step == "library" else releases.body)
    file = backends.find("cuda")
    assert file.facts.sha256 == sha(older)
    reason = backends.ask("cuda").reason
    assert ("its SHA-256 is not the one" in reason) is (step == "description")
    releases.install()
    assert releases.is_installed()


def test_full_disk_is_said_and_what_was_fetched_is_kept(releases):
    with limited_files(150_000):
        assert releases.refusal() == "disk-full"
    assert not releases.library.exists()
    releases.install()
    assert releases.server.gets("/libggml-cuda-x86_64.so")[-1].headers["range"] == "bytes=150000-"


def test_space_for_the_download_and_its_copy_is_checked_first(releases, monkeypatch):
    free_bytes = 0
    monkeypatch.setattr(disk, "free_bytes", lambda _path: free_bytes)
    partial = releases.library.parent / "libggml-cuda-x86_64.so.part"
    for share, have in ((0.5, 0.0), (1.5, 0.0), (1.3, 0.5), (1.6, 0.5), (2.1, 0.0)):
        free_bytes = int(share * len(releases.body))
        releases.library.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(bytes(int(have * len(releases.body))))
        if share + have < 2:
            assert releases.refusal() == "disk-full"
            assert not releases.server.gets("/libggml-cuda-x86_64.so")
        else:
            releases.install()
            assert releases.is_installed()
            releases.library.unlink()


def test_folder_that_this_user_may_not_write_is_named(releases):
    with tempfile.TemporaryDirectory() as folder:  # a folder that another user may reach
        os.chmod(folder, 0o555)
        error = releases.run("install", "cuda", code=2, EDGEINFER_HOME=folder, AS_ANOTHER="1")
        os.chmod(folder, 0o755)
    assert f"{folder}/data" in error["message"]
    assert "Permission denied" in error["message"]


def test_doctor_names_the_command_where_the_driver_can_run_it(releases):
    drivers = [
        ("none", False, {}),
        (12040, False, {}),
        (13000, True, {}),
        (13000, False, {"NO_KEY": "1"}),
        ("crash", False, {}),
        ("crash", False, {"CARD": "NVIDIA"}),
        (13000, True, {"CARD": "NVIDIA"}),
    ]
    for driver, is_named, more in drivers:
        out = releases.start("doctor", "--json", driver=driver, **more).communicate()[0]
        checks = json.loads(out)["result"]["checks"]
        assert any(check["fix"] == "edgeinfer backend install cuda" for check in checks) is is_named
        crash = "NVIDIA's driver: the process that loaded it ended with SIGSEGV"
        assert any(check["found"] == crash for check in checks) is (driver == "crash")
        bare_card = "NVIDIA found, but no library for it"
        assert any(check["found"] == bare_card for check in checks) is ("CARD" in more)
    assert releases.server.seen == []


def test_publisher_takes_the_library_of_this_llama_cpp_only(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "DIST", tmp_path)
    monkeypatch.setattr(publish, "OUT", tmp_path / "release")
    publish.OUT.mkdir()
    assert publish.release_backends() == ()
    library = tmp_path / "backends/libggml-cuda.so"
    library.parent.mkdir()
    library.write_bytes(b"code")
    build = backend_loading.this_build()
    facts = LibraryFacts(name="cuda", build=build, sha256=sha(b"code"), size_bytes=4)
    backends.facts_path(library).write_bytes(msgspec.json.encode(facts))
    (released,) = publish.release_backends()
    assert released.facts == facts
    assert (released.size_bytes, released.sha256) == (4, sha(b"code"))
    assert (publish.OUT / released.name).read_bytes() == b"code"
    for change in ({"build": msgspec.structs.replace(build, binding="0.0.1")}, {"sha256": "0" * 64}):
        other = msgspec.structs.replace(facts, **change)
        backends.facts_path(library).write_bytes(msgspec.json.encode(other))
        with pytest.raises(SystemExit, match="make cuda"):
            publish.release_backends()
