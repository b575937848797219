"""CRIU's image files: a magic number, then length-prefixed protobuf, then raw bytes.

Only as much protobuf as editing needs: a message is a list of (field number, wire type, value), order
and unknown fields kept, so what this module does not know passes through unchanged. The field numbers
below are those of CRIU's `images/*.proto`.
"""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import SnapshotCorruptError

VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
Field = tuple[int, int, int | bytes]
Message = list[Field]


#: A memory area, in field MM_VMAS of an `mm` message.
MM_VMAS = 14
AREA_START = 1
AREA_END = 2
AREA_OFFSET = 3
AREA_FILE = 4
AREA_FLAGS = 6
AREA_STATUS = 7
AREA_OPEN_FLAGS = 10
PAGEMAP_VADDR = 1
PAGEMAP_PAGES32 = 2
PAGEMAP_FLAGS = 4
PAGEMAP_PAGES = 5
FILE_TYPE = 1
FILE_ID = 2
FILE_REG = 3
REG_ID = 1
REG_FLAGS = 2
REG_POS = 3
REG_OWNER = 5
REG_NAME = 6
REG_SIZE = 8
REG_MODE = 10
CORE_THREAD = 5
THREAD_NICE = 3
THREAD_POLICY = 4
THREAD_PRIORITY = 5
#: What CRIU writes for a regular file in FILE_TYPE.
REGULAR_FILE = 1
#: Bits of a memory area's status.
AREA_REGULAR = 1
AREA_VDSO = 1 << 3
AREA_FILE_PRIVATE = 1 << 6
AREA_ANON_PRIVATE = 1 << 9
MAP_PRIVATE = 2
MAP_ANONYMOUS = 0x20
MAP_GROWSDOWN = 0x100


class Image:
    """One image file: its magic numbers and its messages, raw."""

    def __init__(self, magic: bytes, messages: list[bytes]) -> None:
        self.magic, self.messages = magic, messages


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes) -> Message:
    """Return the fields of a message. Raises SnapshotCorruptError if it is none."""
    fields: Message = []
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            value: int | bytes
            if kind == VARINT:
                value, at = _varint(data, at)
            else:
                size, at = _varint(data, at) if kind == BYTES else ({FIXED64: 8, FIXED32: 4}[kind], at)
                value, at = data[at : at + size], at + size
            fields.append((number, kind, value))
    except (IndexError, KeyError) as error:
        raise SnapshotCorruptError(f"an image of CRIU cannot be understood: {error!r}") from error
    return fields


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    out = []
    for number, kind, value in message:
        out.append(_encoded(number << 3 | kind))
        if isinstance(value, int):
            out.append(_encoded(value))
        else:
            out.append((_encoded(len(value)) if kind == BYTES else b"") + value)
    return b"".join(out)


def number(message: Message, field: int, default: int = 0) -> int:
    """Return the integer in a field."""
    return next((value for n, _, value in message if n == field and isinstance(value, int)), default)


def part(message: Message, field: int) -> Message:
    """Return the message in a field; empty if there is none."""
    return next(
        (decode(value) for n, _, value in message if n == field and isinstance(value, bytes)), []
    )


def with_number(message: Message, field: int, value: int) -> Message:
    """Return the message with an integer field set, in its place or at the end."""
    if any(n == field for n, _, _ in message):
        return [(n, kind, value if n == field else old) for n, kind, old in message]
    return [*message, (field, VARINT, value)]


def read(path: Path) -> Image:
    """Read an image file made of messages only. Raises SnapshotCorruptError if it is truncated."""
    data = path.read_bytes()
    messages = []
    at = 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise SnapshotCorruptError(f"{path} is truncated")
        messages.append(data[at - size : at])
    return Image(data[:8], messages)


def write(path: Path, image: Image) -> None:
    path.write_bytes(image.magic + b"".join(len(m).to_bytes(4, "little") + m for m in image.messages))
