"""One lock per model: whoever changes it holds the lock of its own small file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.errors import CatalogError, ModelBusyError
from edgeinfer.models.names import Reference
from edgeinfer.system import paths
from edgeinfer.system.disk import locked, room_errors

LOCKS = ".locks"


def place(folder: str) -> Path:
    """Where the lock of the model in `folder` lies."""
    return paths.models_dir() / LOCKS / folder


@contextmanager
def changing(ref: Reference, but: str = "") -> Iterator[None]:
    """Hold the model's lock, and tell in words what the disk refuses; `but`: what is not lost then.

    Raises ModelBusyError, DiskFullError, CatalogError.
    """
    try:
        with room_errors(paths.models_dir(), but), model_lock(ref):
            yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise CatalogError(
            f"{place}{error.strerror or error}", hint="check who may write to the data directory"
        ) from error


@contextmanager
def model_lock(ref: Reference) -> Iterator[None]:
    """Hold the model's lock. Raises ModelBusyError at once when somebody else has it."""
    path = place(ref.folder)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def busy() -> None:
        raise ModelBusyError(f"{ref} is being changed by {_holder(path)}")

    with locked(path, busy) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def _holder(path: Path) -> str:
    pid = path.read_text("ascii", "replace").strip()
    return f"process {pid}" if pid.isdecimal() else "another process"
