"""Limits of control groups, read from made trees of /proc and /sys."""

import mmap
import os
from pathlib import Path

import pytest

from edgeinfer.platform import machine

GB = 10**9


def tree(root: Path, cgroup: str, files: dict[str, object]) -> Path:
    """Make the /proc and /sys of a machine of 16 GB (12 available), in the control group `cgroup`."""
    files = {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()},
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_the_kernels_estimate_counts(tmp_path: Path) -> None:
    memory = machine.read_memory(tree(tmp_path, "0::/user\n", {"user/memory.max": "max\n"}))
    assert (memory.total_bytes, memory.available_bytes) == (16_000_000 * 1024, 12_000_000 * 1024)
    assert "MemAvailable" in memory.reason


def group(limit: object, used: int, stat: str = "", folder: str = "") -> dict[str, object]:
    """Return the memory files of a control group of version 2."""
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


IN_CACHE = f"anon {GB}\ninactive_file {2 * GB}\nactive_file {4 * GB}\nshmem 5"
HALF_IN_CACHE = group(4 * GB, 3 * GB, f"inactive_file {GB // 2}", "a/")
TIGHTER_ABOVE = group(6 * GB, 0, folder="a/b/") | group(8 * GB, 7 * GB, folder="a/")


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available", "ending"),
    [
        # a container, whose root is its own group, with the weights in the page cache
        ("/", group(8 * GB, 7 * GB, IN_CACHE), 8 * GB, 7 * GB, "memory.max"),
        # limit and usage come from the same group, wherever the limit is
        ("/a/b", group("max", GB, folder="a/b/") | HALF_IN_CACHE, 4 * GB, 3 * GB // 2, "a/memory.max"),
        # the group that leaves least counts, not the first
        ("/a/b", TIGHTER_ABOVE, 6 * GB, GB, "a/memory.max"),
        ("/", group(GB, 2 * GB), GB, 0, "memory.max"),
        # systemd's MemoryHigh=, above which processes are slowed down
        ("/", group("max", GB) | {"memory.high": 3 * GB}, 3 * GB, 2 * GB, "memory.high"),
        ("/", group(2 * GB, GB) | {"memory.high": "max"}, 2 * GB, GB, "memory.max"),
    ],
    ids=["container", "same group", "tightest group", "over its limit", "high", "high is max"],
)
def test_control_group_limits_memory(tmp_path: Path, cgroup, files, total, available, ending) -> None:
    memory = machine.read_memory(tree(tmp_path, f"0::{cgroup}\n", files))
    assert (memory.total_bytes, memory.available_bytes) == (total, available)
    assert memory.reason.endswith(ending)


def test_version_1_groups(tmp_path: Path) -> None:
    files = {
        "memory/c/memory.limit_in_bytes": 2 * GB,
        "memory/c/memory.usage_in_bytes": GB,
        "memory/c/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB // 2}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": GB,
        "cpu,cpuacct/c/cpu.cfs_quota_us": "1\n",
        "cpu/c/cpu.cfs_quota_us": "150000\n",
        "cpu/c/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    root = tree(tmp_path, "4:memory:/c\n3:cpu,cpuacct:/c\n0::/\n", files)
    assert machine.read_memory(root).available_bytes == 3 * GB // 2
    assert machine.read_machine(root).quota == 1.5


def test_least_processor_time_of_all_groups_counts(tmp_path: Path) -> None:
    quotas = {"a/b/cpu.max": "400000", "a/cpu.max": "250000", "cpu.max": "max"}
    files = {name: f"{quota} 100000\n" for name, quota in quotas.items()}
    assert machine.read_machine(tree(tmp_path, "0::/a/b\n", files)).quota == 2.5
    assert machine.read_machine(tmp_path / "nothing").quota is None


def test_unknown_memory_is_unlimited(tmp_path: Path) -> None:
    memory = machine.read_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (0, 1 << 62)


def test_this_machine() -> None:
    current = machine.read_machine()
    assert 1 <= current.physical_cores <= current.logical_cpus
    assert 0 < current.memory.available_bytes <= current.memory.total_bytes
    assert machine.resident_bytes() > 1 << 20


def test_rate_of_a_disk_is_measured_or_unknown(tmp_path: Path) -> None:
    large, tiny = tmp_path / "large", tmp_path / "tiny"
    large.touch()
    os.truncate(large, 80_000_001)
    tiny.write_bytes(bytes(5_000_001))
    assert machine.read_rate(large) >= 0
    assert machine.read_rate(tiny) == 0.0, "starting the threads would take most of the time"
    assert bool(machine.read_rate(tiny, tmp_path / "none", large)) == bool(machine.read_rate(large))
    assert machine.read_rate(tmp_path / "none") == 0.0


def test_rate_of_a_disk_counts_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 70_000_003
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", size)
    if not machine.read_rate(tmp_path / "file"):
        pytest.skip("this file system cannot bypass the page cache")
    lengths, preadv = [], os.preadv

    def count(fd: int, buffers: list[mmap.mmap], offset: int) -> int:
        lengths.append(preadv(fd, buffers, offset))
        return lengths[-1]

    monkeypatch.setattr(os, "preadv", count)
    monkeypatch.setattr(machine, "_RATE_S", 60.0)
    machine.read_rate(tmp_path / "file")
    assert sum(lengths) == size
    assert len(lengths) == -(-size // machine._RATE_BLOCK)


def test_gpu_is_where_there_is_a_device_file(tmp_path: Path) -> None:
    assert not machine.has_gpu(tmp_path)
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/card0").touch()
    assert not machine.has_gpu(tmp_path), "a screen computes nothing"
    (tmp_path / "dev/dri/renderD128").touch()
    assert machine.has_gpu(tmp_path)
