"""Random bytes that differ in every process resumed from one snapshot."""

from __future__ import annotations

import hashlib
import itertools
import os
import time

_count = itertools.count()


def random_bytes(size: int, entropy: bytes = b"") -> bytes:
    """Draw `size` bytes, up to 64, from the kernel's randomness, the time, a count and `entropy`.

    A resumed process may repeat any one of them.
    """
    clock, count = time.time_ns().to_bytes(8, "little"), next(_count).to_bytes(8, "little")
    return hashlib.blake2b(os.urandom(16) + clock + count + entropy, digest_size=size).digest()
