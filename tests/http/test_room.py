"""How much memory another model may take: what the kernel says, and less where a control group allows
less.
"""

from __future__ import annotations

from edgeinfer.server.core import eviction

MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable:    4096 kB\n"


def test_the_kernels_estimate_counts(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert eviction.available_bytes(tmp_path / "meminfo", tmp_path / "none") == 4096 << 10


def test_a_control_group_may_allow_less_and_its_page_cache_counts_as_free(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("2097152\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 4096\nactive_file 4096\n")
    assert eviction.available_bytes(tmp_path / "meminfo", tmp_path) == 1048576 + 8192


def test_a_control_group_without_a_limit_changes_nothing(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("max\n")
    assert eviction.available_bytes(tmp_path / "meminfo", tmp_path) == 4096 << 10


def test_where_nothing_is_known_nothing_is_evicted(tmp_path):
    assert eviction.available_bytes(tmp_path / "none", tmp_path) > 1 << 60


def test_this_process_has_a_resident_size():
    assert eviction.rss_bytes() > 1 << 20
    assert 0 < eviction.available_bytes() < 1 << 50
