"""Join the parts of a shipped file, in the format of `edgeinfer.shipping.payload`."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

import msgspec

from edgeinfer.models.store import PulledModel
from edgeinfer.platform.disk import durable_file, sha256_of_part
from edgeinfer.shipping import payload
from edgeinfer.shipping.bundle import HEADER_BYTES, field


def with_field(bootloader: bytes, key: bytes, value: str) -> bytes:
    """Return a copy of the bootloader with the field `key` set to `value`."""
    offset = payload.find_field(bootloader, key)
    field = key + value.encode()
    if len(field) >= payload.FIELD_BYTES:
        raise SystemExit(f"error: {value} is too long for the bootloader's field")
    return (
        bootloader[:offset]
        + field.ljust(payload.FIELD_BYTES, b"\0")
        + bootloader[offset + payload.FIELD_BYTES :]
    )


def assemble(bootloader: Path, name: str, packed: bytes, archive: Path, out: Path) -> None:
    """Write `out`, the executable shipped file without a model, atomically (by a rename)."""
    head = with_field(bootloader.read_bytes(), payload.APP_FIELD, name)
    head += bytes(-len(head) % payload.PAGE)
    trailer = payload.TRAILER.pack(payload.TRAILER_MAGIC, len(head), len(packed), 0, 0)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    with scratch.open("wb") as file:
        for part in (head, packed, bytes(-len(packed) % payload.PAGE), trailer, archive.read_bytes()):
            file.write(part)
    scratch.chmod(0o755)
    os.replace(scratch, out)


def with_model(program: Path, record: PulledModel, out: Path) -> None:
    """Write `out`: a copy of the shipped file `program` with the pulled model inside."""
    shipped = payload.open_shipped(program)
    with program.open("rb") as old, durable_file(out.absolute(), 0o755) as new:
        head = old.read(shipped.payload_offset)
        new.write(with_field(head, payload.MODEL_FIELD, field(record)))
        new.write(old.read(shipped.payload_length))
        _pad(new)
        bundle_offset = new.tell()
        length = _write_bundle(new, record)
        span = (shipped.payload_offset, shipped.payload_length)
        new.write(payload.TRAILER.pack(payload.TRAILER_MAGIC, *span, bundle_offset, length))
        old.seek(shipped.archive_offset)
        new.write(old.read())


def _write_bundle(new: BinaryIO, record: PulledModel) -> int:
    """Write the bundle section (`shipping.bundle`) at the end of `new`; return its length (bytes)."""
    start = new.tell()
    header = msgspec.json.encode(record)
    if len(header) + 8 > HEADER_BYTES:
        raise SystemExit(f"error: {record.name} has too many files to be bundled")
    new.write((struct.pack("<Q", len(header)) + header).ljust(HEADER_BYTES, b"\0"))
    for path, bundled in zip(record.paths, record.files, strict=True):
        with path.open("rb") as source:
            digest = sha256_of_part(
                source.fileno(), 0, bundled.size_bytes, lambda chunk, _done: new.write(chunk)
            )
        if digest != bundled.sha256:
            raise SystemExit(f"error: {path} was changed after it was pulled")
        _pad(new)
    return new.tell() - start


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % payload.PAGE))
