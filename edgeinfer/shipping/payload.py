"""Read the one-file program: the sections after its bootloader. Standard library only.

    bootloader                     ELF; its field EDGEINFER-APP= names the application's folder,
                                   EDGEINFER-MODEL= the model
    payload   (page aligned)       "EDGEPAY1", u64 length of the index, the index (JSON), its blocks
    bundle    (page aligned)       only with a model inside: u64 length, JSON, each file page aligned
    trailer                        "EDGETRL1", u64 offset and length of payload, then of bundle
    archive                        PyInstaller's, with its cookie as the file's last bytes

Numbers are little-endian. The folder's name is `VERSION-` and the first 20 digits of the index's
SHA-256; the index contains the SHA-256 of every file. So the name verifies every unpacked byte, and
equal inputs have equal names. The classes here are NamedTuples, because `dataclasses` imports
`inspect`, which would delay a first start by 10 ms.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from edgeinfer.errors import ChecksumError, ShippingError

PAGE = 4096
FIELD_BYTES = 112
APP_FIELD = b"EDGEINFER-APP="
MODEL_FIELD = b"EDGEINFER-MODEL="
PAYLOAD_MAGIC = b"EDGEPAY1"
TRAILER = struct.Struct("<8sQQQQ")
TRAILER_MAGIC = b"EDGETRL1"
#: PyInstaller's cookie, the last bytes of the file (big-endian): magic, length of the archive, offset
#: and length of its table of contents, Python's version, name of Python's library.
COOKIE = struct.Struct("!8sIIII64s")
COOKIE_MAGIC = b"MEI\014\013\012\013\016"
#: Number of bytes at the file's start in which APP_FIELD and MODEL_FIELD lie, both in the bootloader.
HEAD_BYTES = 1 << 20
#: Maximum size (bytes) of a payload's index (its list of files), so that a damaged length causes no
#: huge allocation.
MAX_INDEX_BYTES = 8 << 20


class PayloadEntry(NamedTuple):
    """A file of the payload. Its content is in block number `block`, after that of earlier files."""

    path: str
    mode: int
    size: int
    sha256: str
    block: int


class Block(NamedTuple):
    """The joined contents of some files, compressed: `size` bytes of xz at `offset` of the payload.

    `raw` is the number of bytes before compression.
    """

    offset: int
    size: int
    raw: int


class Index(NamedTuple):
    """The payload's table of contents. `name` is that of the application's folder.

    `links` are the symbolic links as (path, target). `relocate` lists the executables that get the path
    of the unpacked ELF interpreter.
    """

    version: str
    files: tuple[PayloadEntry, ...]
    links: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...]
    relocate: tuple[str, ...]
    name: str

    @property
    def size(self) -> int:
        """Size on disk (bytes) once unpacked."""
        return sum(entry.size for entry in self.files)


class Shipped(NamedTuple):
    """Offsets and lengths (bytes) of a one-file program's parts. A length of 0 means no such part.

    `app` is the name of the application's folder; `model` is `NAME-DIGEST` of the bundled model, or "".
    """

    path: Path
    app: str
    model: str
    payload_offset: int
    payload_length: int
    bundle_offset: int
    bundle_length: int
    archive_offset: int


def read_field(head: bytes, key: bytes) -> str:
    """Return the bootloader's field `key`. Raises ShippingError if `head`, a file's start, has none."""
    position = find_field(head, key)
    return head[position + len(key) : position + FIELD_BYTES].split(b"\0", 1)[0].decode()


def find_field(head: bytes, key: bytes) -> int:
    """Return the offset of the bootloader's field `key` in `head`. Raises ShippingError without it."""
    position = head.find(key)
    if position < 0:
        problem = f"this is not an edgeinfer binary: its bootloader has no field {key.decode()}"
        raise ShippingError(problem, hint="download the file again")
    return position


def open_shipped(path: Path) -> Shipped:
    """Find the parts of a one-file program.

    Raises OSError if `path` cannot be read, ShippingError if it is not a one-file program.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file_size = file.seek(0, os.SEEK_END)
        file.seek(max(0, file_size - COOKIE.size))
        cookie = file.read(COOKIE.size)
        if len(cookie) != COOKIE.size or not cookie.startswith(COOKIE_MAGIC):
            message = f"{path} is not an edgeinfer binary, or it was truncated"
            raise ShippingError(message, hint="download the file again")
        archive = file_size - int(COOKIE.unpack(cookie)[1])
        file.seek(archive - TRAILER.size)
        trailer = file.read(TRAILER.size)
    magic, *places = TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC or any(position > file_size for position in places):
        problem = f"{path} is not an edgeinfer binary, or it was damaged"
        raise ShippingError(problem, hint="download the file again")
    payload, payload_length, bundle, bundle_length = places
    app, model = read_field(head, APP_FIELD), read_field(head, MODEL_FIELD)
    return Shipped(path, app, model, payload, payload_length, bundle, bundle_length, archive)


def read_index(file: BinaryIO, shipped: Shipped) -> Index:
    """Read the payload's index. Raises ChecksumError if its digest is not the one in the bootloader."""
    file.seek(shipped.payload_offset)
    magic, length = struct.unpack("<8sQ", file.read(16))
    if magic != PAYLOAD_MAGIC or length > min(MAX_INDEX_BYTES, shipped.payload_length):
        raise damage_error(shipped.path, "its payload does not start with an index")
    raw = file.read(length)
    index = parse_index(raw)
    if index is None or index.name != shipped.app:
        raise damage_error(shipped.path, "its index was changed after the build")
    return index


def parse_index(raw: bytes) -> Index | None:
    """Parse an index; return None if it is invalid or has a path outside the application's folder."""
    try:
        document: dict[str, Any] = json.loads(raw)
        version = document["version"]
        names = [entry[0] for entry in document["files"]] + [path for path, _ in document["links"]]
        if any(name.startswith("/") or ".." in name.split("/") for name in names):
            return None
        return Index(
            version=version,
            files=tuple(PayloadEntry(*entry) for entry in document["files"]),
            links=tuple((path, target) for path, target in document["links"]),
            blocks=tuple(Block(*block) for block in document["blocks"]),
            relocate=tuple(document["relocate"]),
            name=folder_name(version, raw),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def folder_name(version: str, index: bytes) -> str:
    """Return the name of an application's folder: `VERSION-` and 20 digits of the index's SHA-256."""
    return f"{version}-{hashlib.sha256(index).hexdigest()[:20]}"


def block_bytes(fd: int, shipped: Shipped, block: Block) -> bytes:
    """Read and decompress one block from the file `fd`. Thread-safe. Raises ChecksumError."""
    import lzma  # slow import (1 ms), not needed by launches

    packed = os.pread(fd, block.size, shipped.payload_offset + block.offset)
    try:
        raw = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise damage_error(shipped.path, f"a block cannot be read: {error}") from error
    if len(raw) != block.raw:
        raise damage_error(shipped.path, "a block's length differs from the index")
    return raw


def split_block(
    raw: bytes, entries: list[PayloadEntry], path: Path
) -> Iterator[tuple[PayloadEntry, memoryview]]:
    """Yield a block's files and their content. Raises ChecksumError if a file's SHA-256 differs.

    `raw` is the decompressed block, and `path` that of the program, for the error.
    """
    offset, view = 0, memoryview(raw)
    for entry in entries:
        content = view[offset : offset + entry.size]
        offset += entry.size
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise damage_error(path, f"{entry.path} in it was changed after the build")
        yield entry, content


def damage_error(path: Path, reason: str) -> ChecksumError:
    """Return the error for a damaged one-file program: "PATH is damaged: REASON"."""
    hint = "download the file again and compare it with its SHA256SUMS"
    return ChecksumError(f"{path} is damaged: {reason}", hint=hint)


# --- the ELF interpreter of an executable, which is an absolute path


def interpreter_span(elf: bytes | memoryview) -> tuple[int, int]:
    """Return offset and length of the interpreter's path in an executable, without the 0 at its end.

    Raises ShippingError if it has none.
    """
    table, size, count = struct.unpack_from("<Q", elf, 32)[0], *struct.unpack_from("<HH", elf, 54)
    for n in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", elf, table + n * size)
        if kind == 3:  # PT_INTERP: the interpreter's segment
            return offset, length - 1
    problem = "the criu executable has no ELF interpreter: it is not linked dynamically"
    raise ShippingError(problem, hint="download a release, or build again with a dynamic criu")


def pad(path: str, length: int) -> bytes:
    """Pad `path` with leading slashes to `length` bytes. Raises ShippingError if `path` is longer."""
    raw = os.fsencode(path)
    if len(raw) > length:
        message = f"the path of CRIU's ELF interpreter is too long: {path}"
        raise ShippingError(message, hint="set EDGEINFER_HOME to a shorter path")
    return b"/" * (length - len(raw)) + raw


def relocate(elf: bytes | memoryview, interpreter: str) -> bytes:
    """Return a copy of the executable `elf` whose ELF interpreter is at the path `interpreter`.

    With `interpreter` "", the path consists of slashes, as in the executables of the payload.
    """
    offset, length = interpreter_span(elf)
    return bytes(elf[:offset]) + pad(interpreter, length) + bytes(elf[offset + length :])
