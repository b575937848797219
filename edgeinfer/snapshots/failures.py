"""Record builds that failed for good, until something they depend on has changed.

SNAPSHOTS/.NAME-PROGRAM.failed    a `Failure` in JSON; a build of NAME that succeeds removes it
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgeinfer.errors import (
    DiskFullError,
    EdgeInferError,
    InterruptedByUser,
    OutOfMemoryError,
    SnapshotsUnavailableError,
)
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole
from edgeinfer.snapshots import fingerprint, format

_SUFFIX = ".failed"
#: What may be otherwise the next time although nothing that is stamped has changed.
_PASSING = (DiskFullError, InterruptedByUser, OutOfMemoryError, SnapshotsUnavailableError)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A build that failed. `at_s` is Unix time, `depends_on` the digest of what it depended on."""

    name: str
    model: str
    message: str
    at_s: float
    depends_on: str


def killed(what: str) -> OutOfMemoryError:
    """Return the error for a process of a build that somebody killed; it is not remembered."""
    return OutOfMemoryError(f"{what} was killed, as the kernel does when memory is short")


def digest_of(files: Sequence[str], options: bytes) -> str:
    """Digest a build's program, machine, files, options (64 hex). Raises OSError."""
    stamps = fingerprint.own_files() | {path: fingerprint.stamp(path) for path in files}
    parts: list[object] = [*fingerprint.machine_keys().items(), options]
    parts += stamps.items()
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def remember(failure: Failure, error: EdgeInferError) -> None:
    """Write the failure down, unless `error` may pass by itself."""
    if not isinstance(error, _PASSING):
        write_whole(_path(failure.name), msgspec.json.encode(failure), 0o600)


def forget(name: str) -> None:
    """Forget the failure of a snapshot's name, if there is one."""
    _path(name).unlink(missing_ok=True)


def find(name: str) -> Failure | None:
    """The failure of a snapshot's name."""
    return _read(_path(name))


def listed() -> list[Failure]:
    """This program's failures, by name."""
    found = paths.snapshots_dir().glob(f".*-{fingerprint.program_tag()}{_SUFFIX}")
    return [failure for path in sorted(found) if (failure := _read(path)) is not None]


def forget_model(model: str) -> None:
    """Forget the failures of every snapshot of a model."""
    for failure in listed():
        if format.model_part(failure.name) == format.part_of(model):
            forget(failure.name)


def _path(name: str) -> Path:
    return paths.snapshots_dir() / f".{name}-{fingerprint.program_tag()}{_SUFFIX}"


def _read(path: Path) -> Failure | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (OSError, msgspec.MsgspecError):
        return None
