"""Take the model out of a shipped file that has one inside, at that file's first start.

The bundle section of the file (`shipping.payload`) starts with a u64 and so much JSON, then the model's
files, each at a page boundary. llama.cpp maps a GGUF from its first byte on, so the model has to become
a file of its own once: a clone of the same blocks where the file system can do that (btrfs, xfs),
otherwise one copy. There is never a second: what is copied is hashed on the way and is the store's own
file.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from edgeinfer.errors import ChecksumError, EdgeInferError, ShippingError
from edgeinfer.models import store
from edgeinfer.models.store import PulledFile, PulledModel, model_lock
from edgeinfer.platform.disk import need_room, sha256_of_part, share_blocks, sync, whole_file
from edgeinfer.shipping import payload
from edgeinfer.shipping.payload import PAGE, Shipped

_CHUNK = 4 << 20
#: (bytes done, bytes in all)
Progress = Callable[[int, int], None]


class BundledFile(msgspec.Struct, frozen=True):
    """One file of the model, `offset` bytes into the bundle section."""

    name: str
    offset: int
    size_bytes: int
    sha256: str


class Bundle(msgspec.Struct, frozen=True):
    """The header of the bundle section: the model's record, and where its files are."""

    record: PulledModel
    files: tuple[BundledFile, ...]


def field(record: PulledModel) -> str:
    """Return the bootloader's field of a bundled model: its name and 12 digits of its SHA-256."""
    return f"{record.name}-{record.sha256[:12]}"


def read(shipped: Shipped) -> Bundle:
    """Read the bundle section's header. Raises ShippingError without one, ChecksumError."""
    if not shipped.bundle_length:
        raise ShippingError(f"{shipped.path} contains no model")
    with shipped.path.open("rb") as file:
        file.seek(shipped.bundle_offset)
        (length,) = struct.unpack("<Q", file.read(8))
        raw = file.read(min(length, 64 << 10))
    try:
        bundle = msgspec.json.decode(raw, type=Bundle)
    except msgspec.MsgspecError as error:
        raise ChecksumError(
            f"{shipped.path} is damaged: its model has no header", hint="download the file again"
        ) from error
    if field(bundle.record) != shipped.model:
        raise ChecksumError(
            f"{shipped.path} is damaged: its model is not the one it names",
            hint="download the file again",
        )
    return bundle


def bring_out(shipped: Shipped, progress: Progress) -> PulledModel:
    """Copy the bundled model into the store unless it is there, and mark it as done.

    Raises ChecksumError (nothing is stored then), DiskFullError, ModelBusyError.
    """
    bundle = read(shipped)
    record = bundle.record
    with model_lock(record.reference):
        have = store.read_record(record.folder)
        if have is None or have.sha256 != record.sha256 or not all(p.is_file() for p in have.paths):
            have = _store(shipped, bundle, progress)
    from edgeinfer.shipping.unpack import app_root

    (app_root() / f"{shipped.model}.model").touch()
    return have


def _store(shipped: Shipped, bundle: Bundle, progress: Progress) -> PulledModel:
    folder = bundle.record.folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    need_room(folder, bundle.record.size_bytes, bundle.record.name)
    (folder / store.RECORD).unlink(missing_ok=True)
    files, done = [], 0
    for bundled in bundle.files:
        _take(shipped, bundled, folder / bundled.name, progress, done)
        done += bundled.size_bytes
        info = (folder / bundled.name).stat()
        files.append(
            PulledFile(
                path=bundled.name,
                size_bytes=info.st_size,
                sha256=bundled.sha256,
                mtime_ns=info.st_mtime_ns,
            )
        )
    sync(folder)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = msgspec.structs.replace(bundle.record, files=tuple(files), pulled_at=now)
    store.write_record(record)
    store.remove_stale_files(folder, record)
    return record


def _take(
    shipped: Shipped, bundled: BundledFile, target: Path, progress: Progress, before: int
) -> None:
    """Clone or copy one file, hash it, and rename it into place. `before` bytes are done."""
    start = shipped.bundle_offset + bundled.offset
    with shipped.path.open("rb") as source, whole_file(target, 0o600) as out:
        cloned = _clone(source.fileno(), start, bundled.size_bytes, out.fileno())

        def copy(chunk: bytes, done: int) -> None:
            if not cloned:
                out.write(chunk)
            progress(before + done, shipped.bundle_length)

        digest = sha256_of_part(source.fileno(), start, bundled.size_bytes, copy)
        if digest != bundled.sha256:
            raise ChecksumError(
                f"{bundled.name} in {shipped.path} is damaged", hint="download the file again"
            )


def _clone(source: int, start: int, length: int, target: int) -> bool:
    """Share the source's blocks in whole pages, and truncate to the file's length."""
    whole = length + (-length % PAGE)
    shared = share_blocks(source, target, start, whole)
    os.ftruncate(target, length if shared else 0)
    return shared


def main(argv: list[str]) -> int:
    """Copy the model out of the shipped FILE, at its first start."""
    from edgeinfer import error_text
    from edgeinfer.models.progress import Job, progress_on

    shipped = payload.open_shipped(Path(argv[0]))
    try:
        with progress_on() as report:
            job = Job(report)
            job.begin("copying", shipped.model, total=shipped.bundle_length)
            bring_out(shipped, job.at)
    except EdgeInferError as error:
        print(error_text.describe_error(error), file=sys.stderr)  # noqa: T201
        return error_text.exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
