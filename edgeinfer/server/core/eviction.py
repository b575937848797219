"""How much memory another model may take: what the kernel and the control group leave. Bytes."""

from __future__ import annotations

from pathlib import Path

#: Left free for the page cache, the endpoint itself and everybody else.
RESERVE_BYTES = 512 << 20
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Memory that can be taken without swapping: MemAvailable, or less where a control group allows
    less.

    A huge number where neither file exists (not Linux): then nothing is evicted for memory.
    """
    available = _meminfo_available(meminfo)
    limit = _number(cgroup / "memory.max")
    if limit is not None:
        used = _number(cgroup / "memory.current") or 0
        available = min(available, max(0, limit - used + _cgroup_reclaimable(cgroup / "memory.stat")))
    return available


def _meminfo_available(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _cgroup_reclaimable(path: Path) -> int:
    """Page cache that counts as used but can be taken back."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return sum(int(value) for key, value in pairs if key in ("inactive_file", "active_file"))
    except OSError:
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def rss_bytes() -> int:
    """Resident memory of this process; 0 where /proc is absent."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096
