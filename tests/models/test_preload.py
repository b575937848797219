"""A model's files are brought into the page cache in the order they are loaded."""

import os
from pathlib import Path

import pytest
from made_gguf import gguf_bytes

from edgeinfer.cli.main import main
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.platform import paths
from edgeinfer.platform.page_cache import cached_bytes, read_in
from edgeinfer.snapshots.format import MANIFEST, Manifest, manifest_text

from .conftest import HASTY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model called "mine", pulled."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf_bytes(tensors=[("token_embd.weight", 3 << 20)]))
    assert main(["pull", str(path), "--name", "mine", "--quiet"]) == 0
    return path


@pytest.fixture
def preloaded(as_json):
    return lambda: as_json("warm", "--preload", "mine")


def drop(path: Path) -> None:
    os.sync()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def is_in_page_cache(path: Path) -> bool:
    """Return whether a file is in memory but for 5 %: a kernel short of pages takes any back."""
    return cached_bytes(path) > 0.95 * path.stat().st_size


def test_models_file_is_in_memory_afterwards(model, preloaded) -> None:
    first = preloaded()
    [path] = map(Path, first["files"])
    drop(path)
    dropped = cached_bytes(path)
    again = preloaded()
    assert again["was_resident_bytes"] == dropped
    assert again["size_bytes"] == path.stat().st_size
    assert is_in_page_cache(path)


def test_snapshot_is_loaded_before_the_model(model, preloaded) -> None:
    folder = Path(paths.snapshots_path()) / "mine@1-program"
    for one in (folder.parent, folder, folder / "images"):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    manifest = Manifest(
        name="mine", model="mine", criu="criu", tier="root", pid=1, link_inode=1, wake_inode=1
    )
    for name in ("memory.img", "images/pages.img"):
        (folder / name).write_bytes(b"x" * 10_000)
        manifest.images[name] = 10_000
    (folder / MANIFEST).write_text(manifest_text(manifest))
    (folder / MANIFEST).chmod(0o600)
    files = preloaded()["files"]
    assert [Path(file).name for file in files[:2]] == ["memory.img", "pages.img"]
    assert len(files) == 3


def test_file_that_is_gone_is_an_error(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    assert read_in([path], lambda _: None) == 100
    with pytest.raises(FileNotFoundError):
        read_in([path, tmp_path / "y"], lambda _: None)


def test_pulled_file_is_in_the_page_cache(server) -> None:
    """A cold start after a download begins with the whole file in memory."""
    server.files["/tiny.gguf"] = gguf_bytes(tensors=[("token_embd.weight", 2 << 20)])
    [path] = pull(f"{server.url}/tiny.gguf", options=PullOptions(name="tiny", retry_policy=HASTY)).paths
    assert is_in_page_cache(path)
