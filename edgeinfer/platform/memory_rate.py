"""Measure how fast all processors together read memory: the bound of decoding on a CPU."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edgeinfer.platform.machine import read_processors

#: Bytes read per round by all threads together: more than the caches of most processors hold.
_BYTES = 128 << 20
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class MemoryRate:
    """Bytes per second of `threads` readers; `busy` if other processes used the processors."""

    bytes_per_s: float
    threads: int
    busy: bool


def read_memory_rate() -> MemoryRate:
    """Measure it now: some 0.2 s, 128 MiB of memory. The best of four rounds counts."""
    found = read_processors()
    threads = max(1, min(found.logical_cpus, round(found.quota or found.logical_cpus), 32))
    busy = os.getloadavg()[0] > found.logical_cpus / 4
    memchr = ctypes.CDLL(None).memchr  # vectorized, and ctypes lets go of the GIL
    memchr.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    size = _BYTES // threads
    parts = [b"\1" * size for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            list(pool.map(lambda part: memchr(part, 0, size), parts))
            best = max(best, size * threads / (time.perf_counter() - began))
    return MemoryRate(best, threads, busy)
