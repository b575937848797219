"""The memory of a restored process: prefetch weights, find llama.cpp's buffers, release idle pages.

llama.cpp allocates each buffer as one large block, which glibc takes from the kernel by itself and
precedes by its size: `buffers` finds them by that, exactly, so nothing of Python's is ever among them.
With another libc or allocator there are none, and nothing is released: the kernel still reclaims pages,
only later.

Released pages stay in the page cache or on the disk and fault back in. Pages written since the restore
(the KV cache) are not dropped but paged out if there is swap.

If a sample of the needed pages is not cached, a thread reads them in the order of the file beside the
faults of the first decode. Cached pages are left alone: mapping them in advance (MADV_POPULATE_READ)
was measured to cost as much as the faults it saves (docs/decisions/043-prefetch.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from io import FileIO
from typing import Any

from edgeinfer.errors import EngineClosedError
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.llama.mappings import (
    DONTNEED,
    HUGEPAGE,
    LARGE_BYTES,
    PAGEOUT,
    Area,
    Range,
    advise,
    areas,
)

PAGE = mmap.PAGESIZE
#: Memory is looked at and given back in windows of this size.
WINDOW_BYTES = 2 << 20
#: posix_memalign with 64, as ggml calls it, puts the chunk's header 48 bytes into its first page.
_LEAD = 48
_IS_MMAPPED = 2
_FLAGS = 7
_PRESENT = 1 << 63
_SWAPPED = 1 << 62
_OF_FILE = 1 << 61


def large_shared() -> list[Area]:
    """Return the large shared mappings of files, the weights, in the order of their addresses."""
    return [
        area
        for area in areas()
        if area.path.startswith("/")
        and area.permissions.endswith("s")
        and area.high - area.low >= LARGE_BYTES
    ]


def buffers() -> list[Range]:
    """Find the whole pages of every large allocation in anonymous memory."""
    found = []
    for area in areas():
        if area.path or area.permissions != "rw-p":
            continue
        at = area.low
        while at + LARGE_BYTES <= area.high:
            size = _chunk_bytes(at, area.high)
            if size:
                found.append(Range(at + PAGE, at + size - PAGE))
            at += size or PAGE
    return found


def _chunk_bytes(at: int, limit: int) -> int:
    """Return the size of the allocation whose first page begins here, or 0."""
    lead, size = (ctypes.c_uint64 * 2).from_address(at + _LEAD)
    total = (size & ~_FLAGS) + _LEAD
    is_one = lead == _LEAD and size & _FLAGS == _IS_MMAPPED and total % PAGE == 0
    return total if is_one and LARGE_BYTES <= total <= limit - at else 0


def give_back(ranges: list[Range]) -> int:
    """Drop these ranges' clean file pages; page out the windows that were written.

    Returns the bytes dropped from this process; they stay in the page cache. Nothing may write to the
    ranges meanwhile.
    """
    clean: list[Range] = []
    own: list[Range] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for low, high in ranges:
            for at in range(low, high, WINDOW_BYTES):
                end = min(at + WINDOW_BYTES, high)
                written = any(
                    e & _SWAPPED or (e & _PRESENT and not e & _OF_FILE)
                    for e in _entries(pagemap, at, end)
                )
                (own if written else clean).append(Range(at, end))
    advise(own, PAGEOUT)
    advise(clean, DONTNEED)
    return sum(end - at for at, end in clean)


def give_back_shared() -> None:
    """Drop the pages of large shared file mappings: the model's file."""
    advise((Range(area.low, area.high) for area in large_shared()), DONTNEED)


def touched_shared() -> list[Area]:
    """List the touched windows of large shared mappings: the weights that computing needs."""
    found = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for area in large_shared():
            for low in range(area.low, area.high, WINDOW_BYTES):
                high = min(low + WINDOW_BYTES, area.high)
                if any(entry & _PRESENT for entry in _entries(pagemap, low, high)):
                    found.append(area._replace(low=low, high=high, offset=area.offset + low - area.low))
    return found


def _entries(pagemap: FileIO, low: int, high: int) -> memoryview[int]:
    """Return a number for each page (admin-guide/mm/pagemap in the kernel's documentation)."""
    return memoryview(os.pread(pagemap.fileno(), (high - low) // PAGE * 8, low // PAGE * 8)).cast("Q")


def want_huge_pages(mapped: Iterable[Area]) -> None:
    """Ask for huge pages in the page cache of these mappings, if the file system has them."""
    advise((Range(area.low, area.high) for area in mapped), HUGEPAGE)


_PROBES = 64
_STEP_BYTES = WINDOW_BYTES
#: With fewer pages missing than this part, faults read them well enough.
_COLD_PART = 0.05

#: Offset and length in a file, in bytes.
Stretch = tuple[int, int]


def prefetch(needed: list[Area]) -> None:
    """Read ahead in the background what of these mappings of files is not cached."""
    cold = []
    with contextlib.suppress(OSError):  # an optimisation: the faults will read it
        for path, mapped in _by_file(needed).items():
            with open(path, "rb", buffering=0) as file:
                if missing_part(file.fileno(), _stretches(mapped)) > _COLD_PART:
                    cold.append(mapped)
    if cold:
        threading.Thread(target=_read_cold, args=[cold], name="prefetch", daemon=True).start()


def _read_cold(cold: list[list[Area]]) -> None:
    with contextlib.suppress(OSError):
        for mapped in cold:
            want_huge_pages(mapped)
            with open(mapped[0].path, "rb", buffering=0) as file:
                read_ahead(file.fileno(), _stretches(mapped))


def _stretches(mapped: list[Area]) -> list[Stretch]:
    return [(area.offset, area.high - area.low) for area in mapped]


def _by_file(mapped: list[Area]) -> dict[str, list[Area]]:
    found: dict[str, list[Area]] = {}
    for area in sorted(mapped, key=lambda area: (area.path, area.offset)):
        found.setdefault(area.path, []).append(area)
    return found


def missing_part(fd: int, stretches: list[Stretch]) -> float:
    """Estimate the uncached part of the stretches, 0 to 1, by a sample."""
    missing = probes = 0
    total = sum(length for _, length in stretches)
    for offset, length in stretches:
        count = max(1, _PROBES * length // total)
        probes += count
        missing += sum(not _is_cached(fd, offset + length * n // count) for n in range(count))
    return missing / probes


def read_ahead(fd: int, stretches: list[Stretch]) -> int:
    """Read the stretches' uncached bytes in steps of whole huge pages; their count."""
    into, done = memoryview(bytearray(_STEP_BYTES)), 0
    for offset, length in stretches:
        at, end = offset, offset + length
        while at < end:
            following = min(at - at % _STEP_BYTES + _STEP_BYTES, end)
            if not _is_cached(fd, following - 1):
                done += os.preadv(fd, [into[: following - at]], at)
            at = following
    return done


def _is_cached(fd: int, offset: int) -> bool:
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


class IdleWatch:
    """Watch one engine from a thread; `release` runs between two decode steps."""

    def __init__(self, engine: Engine, idle_s: float, release: Callable[[], Any]) -> None:
        self._engine = engine
        self._idle_s = idle_s
        self._release = release
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    def stop(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        with contextlib.suppress(EngineClosedError):  # unloaded: the next load has a watch of its own
            self._release_when_idle()

    def _release_when_idle(self) -> None:
        seen = self._activity()
        idle_s = 0.0
        released = False
        step_s = max(0.05, min(5.0, self._idle_s / 4))
        while not self._closed.wait(step_s):
            now = self._activity()
            if now != seen or now[0]:
                seen = now
                idle_s = 0.0
                released = False
                continue
            idle_s += step_s
            if idle_s >= self._idle_s and not released:
                self._release()
                released = True

    def _activity(self) -> tuple[int, int, int]:
        metrics = self._engine.metrics()
        return metrics.running + metrics.queued, metrics.requests_total, metrics.prompt_tokens_total


def release_idle(buffers: list[Range]) -> int:
    """Give back the buffers and the model's file; the bytes dropped from this process."""
    give_back_shared()
    return give_back(buffers)
