"""Wait for a dump with known memory and computing threads: `park.py DIR MEGABYTES THREADS`.

After the resume, the program writes "same" to DIR/result if memory, threads and pid are as before.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
from pathlib import Path


def main() -> None:
    """Park this process; after the resume, compare its memory, threads and pid."""
    home = Path(sys.argv[1])
    megabytes, n_threads = map(int, sys.argv[2:])
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = os.urandom(1 << 20)
    for n in range(megabytes):
        memory[n << 20 : (n + 1) << 20] = bytes([n]) + block[1:]
    digest = hashlib.sha256(memory).digest()
    stop = threading.Event()
    right = [False] * n_threads

    def count(k: int) -> None:  # runs during the dump, with its numbers in registers and on the heap
        steps = 0
        half = 0.0
        while not stop.is_set():
            steps += k + 1
            half += (k + 1) / 2
        right[k] = half == steps / 2

    threads = [threading.Thread(target=count, args=(k,)) for k in range(n_threads)]
    for thread in threads:
        thread.start()
    pid, wake = os.getpid(), os.open(home / "wake", os.O_RDWR)
    (home / "parked").write_text(str(pid))
    os.read(wake, 1)  # the dump is taken here
    stop.set()
    for thread in threads:
        thread.join()
    same = hashlib.sha256(memory).digest() == digest and os.getpid() == pid and all(right)
    (home / "result.new").write_text("same\n" if same else f"DIFFERENT {right}\n")
    (home / "result.new").rename(home / "result")


if __name__ == "__main__":
    main()
