"""What was found out once: kept, forgotten when it is old, and no error where it cannot be."""

import os

import pytest

from edgeinfer.platform import cache_files, paths
from edgeinfer.platform.cache_files import CacheTable


def test_oldest_entries_are_forgotten(monkeypatch):
    monkeypatch.setattr(cache_files, "MOST_ENTRIES", 2)
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
