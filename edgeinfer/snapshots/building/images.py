"""CRIU's image files: a magic number, then length-prefixed protobuf, then raw bytes.

Only as much protobuf as editing needs: a message is a list of (field number, wire type, value), order
and unknown fields kept, so what this module does not know passes through unchanged. The field numbers
below are those of CRIU's `images/*.proto`.
"""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import SnapshotCorruptError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Field = tuple[int, int, int | bytes]
Message = list[Field]


#: A memory area, in field MM_VMAS of an `mm` message.
MM_VMAS = 14
AREA_START, AREA_END, AREA_OFFSET, AREA_FILE, AREA_FLAGS, AREA_STATUS, AREA_OPEN_FLAGS = (
    1,
    2,
    3,
    4,
    6,
    7,
    10,
)
PAGEMAP_VADDR, PAGEMAP_PAGES32, PAGEMAP_FLAGS, PAGEMAP_PAGES = 1, 2, 4, 5
FILE_TYPE, FILE_ID, FILE_REG = 1, 2, 3
REG_ID, REG_FLAGS, REG_POS, REG_OWNER, REG_NAME, REG_SIZE, REG_MODE = 1, 2, 3, 5, 6, 8, 10
CORE_THREAD, THREAD_NICE, THREAD_POLICY, THREAD_PRIORITY = 5, 3, 4, 5
#: What CRIU writes for a regular file in FILE_TYPE.
REGULAR_FILE = 1
#: Bits of a memory area's status.
AREA_REGULAR, AREA_VDSO, AREA_FILE_PRIVATE, AREA_ANON_PRIVATE = 1, 1 << 3, 1 << 6, 1 << 9
MAP_PRIVATE, MAP_ANONYMOUS, MAP_GROWSDOWN = 2, 0x20, 0x100


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
    """The fields of a message. Raises SnapshotCorruptError when it is none."""
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
    """The bytes of a message."""
    out = []
    for number, kind, value in message:
        out.append(_encoded(number << 3 | kind))
        if isinstance(value, int):
            out.append(_encoded(value))
        else:
            out.append((_encoded(len(value)) if kind == BYTES else b"") + value)
    return b"".join(out)


def number(message: Message, field: int, default: int = 0) -> int:
    """The integer in a field."""
    return next((value for n, _, value in message if n == field and isinstance(value, int)), default)


def part(message: Message, field: int) -> Message:
    """The message in a field; empty when there is none."""
    return next(
        (decode(value) for n, _, value in message if n == field and isinstance(value, bytes)), []
    )


def with_number(message: Message, field: int, value: int) -> Message:
    """The message with an integer field set, in its place or, when it is not there, at the end."""
    if any(n == field for n, _, _ in message):
        return [(n, kind, value if n == field else old) for n, kind, old in message]
    return [*message, (field, VARINT, value)]


def read(path: Path) -> Image:
    """An image file made of messages only. Raises SnapshotCorruptError when it is truncated."""
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
    """Write an image file."""
    path.write_bytes(image.magic + b"".join(len(m).to_bytes(4, "little") + m for m in image.messages))
