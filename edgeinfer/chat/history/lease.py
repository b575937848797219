"""Locks that let only one process write to a conversation; a process that ends frees its locks."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from pathlib import Path

# only Linux has open file description locks. On other systems, two processes can write to a
# conversation at the same time; each writes a separate branch
_HAS_LOCKS = sys.platform == "linux"
if sys.platform == "linux":
    from fcntl import F_OFD_GETLK, F_OFD_SETLK, F_UNLCK, F_WRLCK, fcntl

#: Layout of C's `struct flock`: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


class Lease:
    """A lock on a conversation. It ends with `release`, or when the process ends."""

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def acquire(file: Path | None, conversation_id: int) -> Lease | None:
    """Lock a conversation, i.e. a byte of `file`; return None if already locked. Raises OSError.

    Without a file (None), the returned Lease locks nothing.
    """
    if file is None or not _HAS_LOCKS:
        return Lease()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl(descriptor, F_OFD_SETLK, _FLOCK.pack(F_WRLCK, os.SEEK_SET, conversation_id, 1, 0))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return Lease(descriptor)


def is_held(file: Path | None, conversation_id: int) -> bool:
    """Return whether any process, including this one, has locked the conversation in `file`."""
    if file is None or not _HAS_LOCKS:
        return False
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            asked = _FLOCK.pack(F_WRLCK, os.SEEK_SET, conversation_id, 1, 0)
            return bool(_FLOCK.unpack(fcntl(descriptor, F_OFD_GETLK, asked))[0] != F_UNLCK)
        finally:
            os.close(descriptor)
    return False
