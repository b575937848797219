"""Put the parts of a shipped file together (the format: `edgeinfer.shipping.payload`)."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.shipping import payload


def with_field(bootloader: bytes, key: bytes, value: str) -> bytes:
    """The bootloader with one of its fields set."""
    at = payload.find_field(bootloader, key)
    field = key + value.encode()
    if len(field) >= payload.FIELD_BYTES:
        raise SystemExit(f"error: {value} is too long for the bootloader's field")
    return (
        bootloader[:at]
        + field.ljust(payload.FIELD_BYTES, b"\0")
        + bootloader[at + payload.FIELD_BYTES :]
    )


def assemble(bootloader: Path, name: str, packed: bytes, archive: Path, out: Path) -> None:
    """Write the shipped file without a model, executable, by one rename."""
    head = with_field(bootloader.read_bytes(), payload.APP_FIELD, name)
    head += bytes(-len(head) % payload.PAGE)
    trailer = payload.TRAILER.pack(payload.TRAILER_MAGIC, len(head), len(packed), 0, 0)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    with scratch.open("wb") as file:
        for part in (head, packed, bytes(-len(packed) % payload.PAGE), trailer, archive.read_bytes()):
            file.write(part)
    scratch.chmod(0o755)
    os.replace(scratch, out)
