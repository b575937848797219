"""One lock per model: whoever changes it holds a flock on its own small file. The kernel lets go when
the holder dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from edgeinfer import paths
from edgeinfer.catalog.names import Reference
from edgeinfer.errors import ModelBusyError

LOCKS = ".locks"


@contextmanager
def model_lock(ref: Reference) -> Iterator[None]:
    """Hold the model's lock for the block. Raises ModelBusyError at once when another process, or
    thread, has it.
    """
    folder = paths.models_dir() / LOCKS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(
        folder / ref.folder, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelBusyError(f"{ref} is being changed by {_holder(descriptor)}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
    return f"process {pid}" if pid.isdecimal() else "another process"
