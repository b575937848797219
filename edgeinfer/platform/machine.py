"""Read this process's resources: CPUs, memory, GPUs on the PCI bus, speed of memory and disk.

Sources are /proc, /sys and the control groups of version 1 and 2: our group and all its ancestors. A
group still allows its limit minus its usage. Page cache in the usage (`inactive_file`, `active_file`)
counts as free, as it does in the kernel's MemAvailable: clean file pages, such as mapped weights, can
be reclaimed without swapping. Shared memory and locked pages count as used. `memory.high` is a limit,
too: above it the kernel slows the processes down. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_ROOT = Path("/")
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
#: Maximum number of bytes that `read_rate` reads of a file, and number of bytes in each read.
_RATE_BYTES, _RATE_BLOCK = 256 << 20, 1 << 20
#: Smallest file (bytes) that `read_rate` measures. On a disk of 500 MB/s, a file of 16 MiB gave 300
#: MB/s, 1 MiB 110 and 4 KiB less than 1, because starting the threads took most of the time.
_LEAST_RATE_BYTES = 64 << 20
_RATE_S = 0.4
#: Eight threads read from an SSD three times as fast as one.
DISK_THREADS = 8
#: Bytes that `read_memory_rate` reads per round: more than the caches of most CPUs hold.
_RATE_ROUND_BYTES = 128 << 20
_RATE_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that this process may use (`total_bytes`), and may still allocate (`available_bytes`).

    `reason` names what limits `available_bytes`, for example "MemAvailable of /proc/meminfo". If the
    memory is unknown (not Linux), `total_bytes` is 0 and `available_bytes` is 2**62.
    """

    total_bytes: int
    available_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """CPUs that this process may use. `quota` is the limit (CPUs) of its control groups, or None."""

    physical_cores: int
    logical_cpus: int
    quota: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Processors):
    memory: Memory

    def without(self, n_bytes: int) -> Machine:
        """Return a copy with `n_bytes` less of available memory."""
        available_bytes = max(0, self.memory.available_bytes - n_bytes)
        return replace(self, memory=replace(self.memory, available_bytes=available_bytes))


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed of memory or disk, measured by `threads` threads; maybe too low if CPUs were `busy`."""

    bytes_per_s: float
    threads: int
    busy: bool


def read_machine(root: Path = _ROOT) -> Machine:
    """Read CPUs and memory; `root` is the folder that contains /proc and /sys."""
    return Machine(**asdict(read_processors(root)), memory=read_memory(root))


def read_processors(root: Path = _ROOT) -> Processors:
    """Read which CPUs this process may use; `root` is the folder that contains /proc and /sys."""
    everywhere = set(range(os.cpu_count() or 1))
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everywhere
    cores, quota = _physical_cores(cpus, root), _cpu_quota(root)
    return Processors(physical_cores=cores, logical_cpus=len(cpus), quota=quota)


def read_memory(root: Path = _ROOT) -> Memory:
    """Read the available memory: MemAvailable, or less if a control group allows less."""
    info = _table(root / "proc/meminfo")
    if "MemAvailable:" not in info:
        return Memory(total_bytes=0, available_bytes=1 << 62, reason="unknown: no /proc/meminfo")
    total = info.get("MemTotal:", 0) * 1024
    available, reason = info["MemAvailable:"] * 1024, "MemAvailable of /proc/meminfo"
    for limit, used, group in _memory_groups(root):
        total = min(total, limit)
        if limit - used < available:
            available, reason = max(0, limit - used), f"the limit in {group}"
    return Memory(total_bytes=total, available_bytes=available, reason=reason)


def read_gpus() -> tuple[str, ...]:
    """Return the makers of the GPUs on the PCI bus: "AMD", "Intel", "NVIDIA"; others are left out."""
    vendors = set()
    for folder in Path("/sys/bus/pci/devices").glob("*"):
        if read_text(folder / "class").startswith("0x03"):
            vendors.add(_GPU_VENDORS.get(read_text(folder / "vendor"), ""))
    return tuple(sorted(vendors - {""}))


def has_gpu(root: Path = _ROOT) -> bool:
    """Return whether there is a device file of a GPU: of DRM, NVIDIA, AMD or WSL."""
    files = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
    return any((root / "dev/dri").glob("renderD*")) or any((root / file).exists() for file in files)


def resident_bytes() -> int:
    """Return the resident memory of this process (bytes); 0 without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * mmap.PAGESIZE


def memory_threads() -> int:
    """Return the number of threads with which `read_memory_rate` measures."""
    processors = read_processors()
    return max(1, min(processors.logical_cpus, round(processors.quota or processors.logical_cpus), 32))


def is_busy() -> bool:
    """Return whether processes used more than a quarter of the CPUs in the last minute."""
    return os.getloadavg()[0] > read_processors().logical_cpus / 4


def read_memory_rate() -> Rate:
    """Measure the memory bandwidth of all CPUs, which limits decoding. Takes 0.2 s."""
    import ctypes  # slow import: 10 ms with the pool
    from concurrent.futures import ThreadPoolExecutor

    threads = memory_threads()
    memchr = ctypes.CDLL(None).memchr  # memchr is vectorized, and ctypes releases the GIL
    memchr.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    size = _RATE_ROUND_BYTES // threads
    parts = [b"\1" * size for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_RATE_ROUNDS):
            began = time.perf_counter()
            list(pool.map(lambda block: memchr(block, 0, size), parts))
            best = max(best, size * threads / (time.perf_counter() - began))
    return Rate(best, threads, is_busy())


def read_rate(*paths: str | os.PathLike[str]) -> float:
    """Measure a disk's speed (bytes/s) by reading the largest of `paths` uncached for 0.4 s.

    Return 0.0 if that fails, or if no file has 64 MiB. Missing files are left out.
    """
    from concurrent.futures import ThreadPoolExecutor

    def read_block(offset: int) -> int:
        if time.perf_counter() - began > _RATE_S:
            return 0
        with mmap.mmap(-1, _RATE_BLOCK) as block:  # O_DIRECT requires whole pages
            return os.preadv(fd, [block], offset)

    try:
        path = max(filter(os.path.exists, paths), key=os.path.getsize, default="")
        size = os.path.getsize(path)
        if size < _LEAST_RATE_BYTES:
            return 0.0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return 0.0
    try:
        start = max(0, size - _RATE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        began = time.perf_counter()
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            n_bytes = sum(pool.map(read_block, range(start, size, _RATE_BLOCK)))
        return n_bytes / max(1e-9, time.perf_counter() - began)
    except OSError:
        return 0.0
    finally:
        os.close(fd)


def _physical_cores(cpus: set[int], root: Path) -> int:
    def core(cpu: int) -> str:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        return read_text(siblings) or str(cpu)

    return len({core(cpu) for cpu in cpus}) or 1


def _cpu_quota(root: Path) -> float | None:
    """Return the smallest CPU quota of our control groups (CPUs); None without a limit."""
    quotas = []
    for folder in _groups(root, "cpu"):
        older = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        fields = read_text(folder / "cpu.max").split() or older
        # without a limit, the quota is "max" or -1
        if len(fields) == 2 and all(word.isdecimal() for word in fields):
            quotas.append(int(fields[0]) / max(1, int(fields[1])))
    return min(quotas, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield limit, usage without page cache (bytes) and limit file of each group with a limit."""
    for folder in _groups(root, "memory"):
        for limit_file, used_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = read_text(folder / limit_file), read_text(folder / used_file)
            if limit.isdecimal() and used.isdecimal():
                stat = _table(folder / "memory.stat")
                cache = sum(stat.get(f"{prefix}{age}_file", 0) for age in ("inactive", "active"))
                yield int(limit), max(0, int(used) - cache), folder / limit_file


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our control group and of its ancestors, upwards, for a controller."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers:  # in version 1, each controller has its own tree
            if controller not in controllers.split(","):
                continue
            top /= controller
        folder = top / group.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def read_text(path: Path) -> str:
    """Return the stripped text of a file in /proc or /sys; "" if the file is unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def describe_machine() -> str:
    """Return cores, processor, memory and kernel: "2 cores of AMD EPYC 9754, 24 GiB, Linux 6.1"."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else "an unknown processor"
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {processor}, {memory_gib:.0f} GiB, Linux {os.uname().release}"
