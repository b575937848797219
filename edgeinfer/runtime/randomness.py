"""Random bytes that differ in every process resumed from one snapshot."""

from __future__ import annotations

import hashlib
import itertools
import os
import time

_count = itertools.count()


def random_bytes(size: int, entropy: bytes = b"") -> bytes:
    """Draw up to 64 bytes of kernel, time, count and `entropy`: a resume may repeat one."""
    clock, count = time.time_ns().to_bytes(8, "little"), next(_count).to_bytes(8, "little")
    return hashlib.blake2b(os.urandom(16) + clock + count + entropy, digest_size=size).digest()
