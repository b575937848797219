"""Shared prefixes of an agent's sessions: recorded, narrowed by every session, evicted last."""

import os

import pytest

from edgeinfer.runtime.prefix_cache import retention
from edgeinfer.runtime.prefix_cache.retention import CacheLimits


def _names(*labels: str) -> list[str]:
    return [word.encode().ljust(20, b"-").hex() for word in labels]


@pytest.fixture
def folder(tmp_path):
    """The folder of one identity, as the store has it below its root."""
    path = tmp_path / "model/identity"
    path.mkdir(parents=True)
    return path


def test_shared_prefix_is_retained_from_two_sessions_on(tmp_path, folder):
    retention.record_session(folder, "codex", _names("a", "b", "c", "person"))
    assert retention.retained_names(tmp_path) == set()
    retention.record_session(folder, "codex", _names("a", "b", "c", "another", "more"))
    assert retention.retained_names(tmp_path) == set(_names("a", "b", "c"))
    retention.record_session(folder, "codex", _names("a", "b", "third"))
    assert retention.retained_names(tmp_path) == set(_names("a", "b"))


def test_boundary_blocks_follow_the_shared_prefix(folder):
    retention.record_session(folder, "codex", _names("a", "b", "person"))
    retention.record_session(folder, "codex", _names("a", "b", "another"))
    assert retention.boundary_blocks(folder, *_names("b")) == tuple(_names("person"))
    assert retention.boundary_blocks(folder, *_names("a")) == ()


def test_boundary_blocks_are_the_latest_eight(folder):
    for names in (_names("a", "b"), _names("a", "b")):
        retention.record_session(folder, "codex", names)
    for number in range(10):
        retention.record_following(folder, *_names("b", f"folder {number}"))
    retention.record_following(folder, *_names("b", "folder 5"))
    retention.record_following(folder, *_names("a", "elsewhere"))
    assert retention.boundary_blocks(folder, *_names("b")) == tuple(
        _names(*(f"folder {number}" for number in (5, 9, 8, 7, 6, 4, 3, 2)))
    )
    retention.record_session(folder, "codex", _names("a", "b", "more"))
    assert len(retention.boundary_blocks(folder, *_names("b"))) == 8


def test_partial_block_behind_a_boundary_block_is_recorded(folder):
    for names in (_names("a", "b"), _names("a", "b")):
        retention.record_session(folder, "codex", names)
    retention.record_following(folder, *_names("b", "folder"))
    retention.record_following(folder, *_names("folder", "whole"))
    retention.record_following(folder, *_names("folder", "words"), is_tail=True)
    assert retention.agent_blocks(folder, "codex") == tuple(_names("a", "b", "words", "folder"))
    assert retention.agent_blocks(folder, "../codex") == ()


def test_changed_agent_starts_anew(tmp_path, folder):
    for names in (_names("a", "b", "c"), _names("a", "b", "c"), _names("new", "b", "c")):
        retention.record_session(folder, "codex", names)
    assert retention.retained_names(tmp_path) == set()
    retention.record_session(folder, "codex", _names("new", "b", "c"))
    assert retention.retained_names(tmp_path) == set(_names("new", "b", "c"))


def test_invalid_agent_names_and_files_are_ignored(tmp_path, folder):
    retention.record_session(folder, "../outside", _names("a"))
    assert list(tmp_path.rglob("outside")) == []
    retention.record_session(folder, "codex", _names("a"))
    for damaged in ("", "two\nabc", "2\nnothex\n\n", "2\nabc\n\nxyz", "\xff"):
        (folder / "kept/codex").write_text(damaged, "utf-8")
        assert retention.retained_names(tmp_path) == set()
        assert retention.boundary_blocks(folder, "abc") == ()
    retention.record_session(folder, "codex", _names("a"))


def test_sessions_of_two_keys_do_not_disturb_each_other(tmp_path, folder):
    for salt in ("mine", "theirs", "mine", "theirs", ""):
        retention.record_session(folder, "codex", _names(f"{salt} a", f"{salt} b"), salt)
    assert retention.retained_names(tmp_path) == set(_names("mine a", "mine b", "theirs a", "theirs b"))
    assert retention.agent_blocks(folder, "codex", "mine") == tuple(_names("mine a", "mine b"))
    assert retention.agent_blocks(folder, "codex", "another") == ()


def test_shared_prefixes_are_evicted_last(tmp_path, folder):
    names = _names("first", "second", "third")
    for age, name in enumerate(names):  # the agent's is the oldest
        path = folder / f"{name}{retention.SUFFIX}"
        path.write_bytes(bytes(1 << 20))
        os.utime(path, ns=(age + 1, age + 1))
    for _ in range(2):
        retention.record_session(folder, "codex", names[:1])
    removed, _ = retention.prune(tmp_path, CacheLimits(max_bytes=2 << 20, margin_bytes=0))
    assert removed >= 1
    assert (folder / f"{names[0]}{retention.SUFFIX}").exists()
    assert not (folder / f"{names[1]}{retention.SUFFIX}").exists()
