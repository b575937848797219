"""`edgeinfer backend`: a library comes from a folder or a server, whole and verified, or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fake_hub import Fault, FaultServer, sha

from edgeinfer.catalog.fetching import backends
from edgeinfer.catalog.progress.job import Job
from edgeinfer.cli import main
from edgeinfer.errors import CatalogError, ChecksumError, DownloadError, SourceNotFoundError
from edgeinfer.runtime.backends import files
from edgeinfer.runtime.backends.files import Build, Facts

BUILD = Build(binding="0.3.36", ggml="0.25.3", commit="abc1234", machine="linux-x86_64")
LIBRARY = b"\x7fELF" + bytes(range(256)) * 4000


def described(build: Build = BUILD) -> bytes:
    facts = Facts(name="cuda", build=build, sha256=sha(LIBRARY), size_bytes=len(LIBRARY))
    return msgspec.json.encode(facts)


@pytest.fixture
def release(server: FaultServer) -> str:
    """A release on a server; returns its address."""
    server.files["/v1/libggml-cuda.so"] = LIBRARY
    server.files["/v1/libggml-cuda.json"] = described()
    return f"{server.url}/v1"


def test_a_download_goes_on_where_it_stopped(server: FaultServer, release: str, hasty) -> None:
    server.faults.extend([None, *[Fault(cut_after=300_000)] * 2, *[Fault(status=503)] * 3])
    with pytest.raises(DownloadError, match="are kept"):
        backends.add("cuda", release, BUILD, Job(patience=hasty))
    assert files.find("cuda") is None
    file = backends.add("cuda", release, BUILD, Job(patience=hasty))
    assert Path(file.path).read_bytes() == LIBRARY
    assert server.gets("/v1/libggml-cuda.so")[-1].headers["range"] == "bytes=600000-"
    assert not file.problem
    assert file.facts.sha256 == sha(LIBRARY)
    assert sorted(p.name for p in files.added_dir().iterdir()) == [
        ".lock",
        "libggml-cuda.json",
        "libggml-cuda.so",
    ]


def test_what_is_not_what_was_promised_is_not_kept(server: FaultServer, release: str, hasty) -> None:
    server.files["/v1/libggml-cuda.so"] = LIBRARY[:-1] + b"!"
    with pytest.raises(ChecksumError, match="as its JSON file says"):
        backends.add("cuda", release, BUILD, Job(patience=hasty))
    server.files["/v1/libggml-cuda.so"] = LIBRARY
    with pytest.raises(ChecksumError, match="as you said"):
        backends.add("cuda", release, BUILD, Job(patience=hasty), sha256="0" * 64)
    assert files.find("cuda") is None


def test_a_library_of_another_build_is_not_even_fetched(server: FaultServer, release: str) -> None:
    server.files["/v1/libggml-cuda.json"] = described(msgspec.structs.replace(BUILD, ggml="0.1"))
    with pytest.raises(CatalogError, match=r"was built for .*ggml 0\.1"):
        backends.add("cuda", release, BUILD, Job())
    assert not server.gets("/v1/libggml-cuda.so")


def test_a_folder_is_a_release_too(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"libggml-cuda\.json is not there"):
        backends.add("cuda", str(tmp_path), BUILD, Job())
    (tmp_path / "libggml-cuda.json").write_bytes(described())
    (tmp_path / "libggml-cuda.so").write_bytes(LIBRARY)
    file = backends.add("cuda", str(tmp_path), BUILD, Job(), sha256=sha(LIBRARY).upper())
    assert file.added
    assert backends.remove("cuda") == len(LIBRARY)
    assert files.find("cuda") is None


def test_the_verb_says_where_a_library_could_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["backend", "add", "cuda"]) == 2
    assert "`source` under [gpu]" in capsys.readouterr().err
    monkeypatch.setenv("EDGEINFER_OFFLINE", "1")
    assert main(["backend", "add", "cuda", "--from", "https://example.invalid/v1"]) == 4
    assert main(["backend", "remove", "cuda"]) == 3
    assert "no libggml-cuda.so was added" in capsys.readouterr().err
    assert main(["backend"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["cuda", "rocm", "sycl", "vulkan"]
