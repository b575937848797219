"""Pin the SHA-256 that each file had when it was first pulled from a source.

Pins lie beside the model's folder (`NAME.lock.json`) and outlive `edgeinfer rm` without `--forget`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.errors import CatalogError
from edgeinfer.models.names import Reference
from edgeinfer.models.plan import Fetched
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole

SUFFIX = ".lock.json"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one source."""

    source: str
    file_name: str
    sha256: str
    size_bytes: int
    first_pulled_at: str


class LockFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of `NAME.lock.json`."""

    pins: tuple[Pin, ...] = ()
    version: Literal[1] = 1


def place(ref: Reference) -> Path:
    """The lock file of a model; it need not exist."""
    return paths.models_dir() / (ref.folder + SUFFIX)


def read(ref: Reference) -> LockFile:
    """The pins of a model. Raises CatalogError when the file cannot be understood."""
    try:
        return msgspec.json.decode(place(ref).read_bytes(), type=LockFile)
    except FileNotFoundError:
        return LockFile()
    except (OSError, msgspec.MsgspecError) as error:
        raise CatalogError(
            f"{place(ref)} cannot be read: {error}", hint=f"`edgeinfer rm {ref} --forget`"
        ) from error


def known(ref: Reference, source: str, file_name: str) -> str:
    """The pinned SHA-256, or "" on the first pull."""
    return next(
        (pin.sha256 for pin in read(ref).pins if (pin.source, pin.file_name) == (source, file_name)), ""
    )


def remember(ref: Reference, source: str, fetched: Iterable[Fetched]) -> None:
    """Pin every file that is not pinned yet."""
    old = read(ref).pins
    have = {(pin.source, pin.file_name) for pin in old}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    new = tuple(
        Pin(
            source=source,
            file_name=one.file_name,
            sha256=one.found_sha256,
            size_bytes=one.size_bytes,
            first_pulled_at=now,
        )
        for one in fetched
        if one.pinned and (source, one.file_name) not in have
    )
    if new:
        write_whole(
            place(ref), msgspec.json.format(msgspec.json.encode(LockFile(pins=old + new)), indent=2)
        )


def forget(ref: Reference) -> None:
    """Drop every pin of a model."""
    place(ref).unlink(missing_ok=True)
