"""Take the model out of a one-file program that contains one, at that file's first start.

The bundle section of the file (`shipping.payload`) starts with a u64 length and JSON of that length,
the model's record; the model's files follow, each at a page boundary. llama.cpp maps a GGUF only from
the start of a file, so each one becomes a file of the model store: a clone that shares disk blocks if
the file system supports that (btrfs, xfs), otherwise a copy. Both are verified by SHA-256.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import msgspec

from edgeinfer.errors import EdgeInferError
from edgeinfer.models import names, store
from edgeinfer.models.progress import Job, progress_on
from edgeinfer.models.pull_plan import FetchedFile
from edgeinfer.models.store import PulledFile, PulledModel, locked_work_folder
from edgeinfer.platform.disk import disk_full_errors, require_free_space, sha256_of_part, share_blocks
from edgeinfer.shipping import payload
from edgeinfer.shipping.payload import PAGE, Shipped
from edgeinfer.shipping.unpack import app_root

#: Size (bytes) of the header with which the bundle section begins: the length of the record, then the
#: record (a PulledModel).
HEADER_BYTES = 64 << 10


def field(record: PulledModel) -> str:
    """Return the bundled model's name in the bootloader: `NAME-` and 12 digits of its SHA-256."""
    return f"{record.name}-{record.sha256[:12]}"


def offsets(record: PulledModel) -> list[int]:
    """Return the offset of each model file, in bytes from the start of the bundle section."""
    starts = [HEADER_BYTES]
    for file in record.files[:-1]:
        starts.append(starts[-1] + file.size_bytes + (-file.size_bytes % PAGE))
    return starts


def read(shipped: Shipped) -> PulledModel:
    """Read the bundled model's record. Raises ChecksumError if it is missing or was changed."""
    if not shipped.bundle_length:
        raise payload.damage_error(shipped.path, "it contains no model")
    with shipped.path.open("rb") as file:
        file.seek(shipped.bundle_offset)
        (length,) = struct.unpack("<Q", file.read(8))
        raw = file.read(min(length, HEADER_BYTES))
    try:
        record = msgspec.json.decode(raw, type=PulledModel)
    except msgspec.MsgspecError as error:
        raise payload.damage_error(shipped.path, "the record of its model is invalid") from error
    if field(record) != shipped.model:
        raise payload.damage_error(shipped.path, f"it contains another model than {shipped.model}")
    return record


def store_model(shipped: Shipped, job: Job) -> PulledModel:
    """Copy the bundled model to the model store unless it is there; return its record.

    Raises ChecksumError, DiskFullError, and ModelBusyError if another process changes that model.
    """
    bundled = read(shipped)
    with locked_work_folder(bundled.reference) as work:
        record = store.read_record(bundled.folder)
        if (
            record is None
            or record.sha256 != bundled.sha256
            or not all(map(Path.is_file, record.paths))
        ):
            record = _store(shipped, bundled, work, job)
    (app_root() / f"{shipped.model}.model").touch()
    return record


def _store(shipped: Shipped, bundled: PulledModel, work: Path, job: Job) -> PulledModel:
    require_free_space(work, bundled.size_bytes, bundled.name)
    places = zip(bundled.files, offsets(bundled), strict=True)
    start = shipped.bundle_offset
    fetched = [_extract(shipped, file, start + offset, work, job) for file, offset in places]
    return store.publish(
        bundled.reference,
        fetched,
        base=bundled.base,
        source=bundled.source,
        requantized_from=bundled.requantized_from,
    )


def _extract(shipped: Shipped, bundled: PulledFile, start: int, work: Path, job: Job) -> FetchedFile:
    """Clone or copy the model file at offset `start` of the one-file program, and verify it."""
    name = names.check_file_name(bundled.path)
    target = work / f"{name}.part"
    with shipped.path.open("rb") as source, disk_full_errors(target), target.open("wb") as out:
        cloned = _clone(source.fileno(), start, bundled.size_bytes, out.fileno())

        def copy(chunk: bytes, done: int) -> None:
            if not cloned:
                out.write(chunk)
            job.report(start - shipped.bundle_offset + done)

        digest = sha256_of_part(source.fileno(), start, bundled.size_bytes, copy)
    if digest != bundled.sha256:
        target.unlink()
        raise payload.damage_error(shipped.path, f"{name} in it was changed after the build")
    return FetchedFile(path=target, file_name=name, found_sha256=digest)


def _clone(source: int, start: int, length: int, target: int) -> bool:
    """Let `target` share whole blocks of `source`, cut to `length`; return whether that works."""
    whole = length + (-length % PAGE)
    shared = share_blocks(source, target, start, whole)
    os.ftruncate(target, length if shared else 0)
    return shared


def main(argv: list[str]) -> int:
    """Copy the model inside the one-file program `argv[0]` to the model store; return the exit status.

    `unpack.main` runs this at the program's first start.
    """
    from edgeinfer import error_text

    shipped = payload.open_shipped(Path(argv[0]))
    try:
        with progress_on() as report:
            job = Job(report)
            job.begin("copying", shipped.model, total=shipped.bundle_length)
            store_model(shipped, job)
    except EdgeInferError as error:
        print(error_text.describe_error(error), file=sys.stderr)  # noqa: T201
        return error_text.exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
