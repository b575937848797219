"""Atomic files, locks and digests."""

import hashlib
import os
import stat
import threading

import pytest

from edgeinfer.errors import DiskFullError
from edgeinfer.platform import disk, paths
from edgeinfer.platform.disk import CacheTable


def test_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    disk.write_durably(path, b"first", 0o600)
    with pytest.raises(ValueError, match="closed"), disk.durable_file(path) as file:
        file.close()  # a closed file cannot be flushed
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_pid_have_two_temporary_files(tmp_path):
    path = tmp_path / "file"
    with disk.new_file(path) as first, disk.new_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # the block that ended last wins
    assert os.listdir(tmp_path) == ["file"]


def test_file_that_does_not_replace_leaves_the_first(tmp_path):
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        with disk.new_file(path, 0o600, replaces=False) as file:
            file.write(content)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_files_that_vanish_have_no_size(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/one.whl").write_bytes(bytes(5))
    (tmp_path / "two").write_bytes(bytes(3))
    (tmp_path / "gone.whl").symlink_to("nowhere")
    assert (disk.bytes_below(tmp_path), disk.bytes_below(tmp_path, ".whl")) == (8, 5)
    assert disk.bytes_below(tmp_path / "none") == 0


def test_fifo_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        disk.open_private(tmp_path / "fifo")


def test_disk_full_error_names_the_place(tmp_path):
    with (
        pytest.raises(DiskFullError, match=r"full; all is well"),
        disk.disk_full_errors(tmp_path / "full", "all is well"),
    ):
        raise OSError(28, "full")
    with pytest.raises(DiskFullError, match="thing needs"):
        disk.require_free_space(tmp_path, 1 << 62, "thing")
    assert disk.free_bytes(tmp_path / "not/there/yet") == disk.free_bytes(tmp_path)


def test_lock_is_held_until_its_block_ends(tmp_path):
    path = tmp_path / "lock"
    held = threading.Event()
    let_go = threading.Event()

    def hold():
        with disk.locked(path):
            held.set()
            let_go.wait(60)

    assert not disk.is_locked(path)
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    assert disk.is_locked(path)
    with disk.locked(path, busy=let_go.set):  # `busy` lets the first holder release the lock
        assert disk.is_locked(path)
    holder.join()
    assert not disk.is_locked(path)


def test_digest_is_of_the_part_that_is_asked_for(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(10_000)
    path.write_bytes(content)
    seen = []
    with open(path, "rb") as file:
        digest = disk.sha256_of_part(file.fileno(), 1000, 5000, lambda piece, _done: seen.append(piece))
    assert digest == hashlib.sha256(content[1000:6000]).hexdigest()
    assert b"".join(seen) == content[1000:6000]
    assert disk.sha256_of(path, lambda _done: None) == hashlib.sha256(content).hexdigest()


def test_oldest_entries_are_forgotten(monkeypatch):
    monkeypatch.setattr(disk, "MOST_ENTRIES", 2)
    table = CacheTable("table.json", dict[str, int])
    assert table.read() == {}
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        table.put(key, value)
    assert list(table.read().items()) == [("a", 3), ("c", 4)]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "text"}', b"\xff"])
def test_unreadable_value_is_unknown_and_replaced(content):
    table = CacheTable("table.json", dict[str, int])
    table.put("a", 1)
    (paths.cache_dir() / "table.json").write_bytes(content)
    assert table.read() == {}
    table.put("b", 2)
    assert table.read() == {"b": 2}


def test_unwritable_cache_is_no_error():
    paths.cache_dir().parent.mkdir(parents=True, exist_ok=True)
    paths.cache_dir().write_text("a file where the folder should be")
    CacheTable("table.json", dict[str, int]).put("a", 1)
    assert os.path.isfile(paths.cache_dir())
