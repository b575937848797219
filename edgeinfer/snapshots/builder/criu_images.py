"""Read and write CRIU's image files: a magic number, then protobuf messages with their lengths.

Only the part of protobuf that editing needs is implemented. The order of fields and unknown fields are
preserved. The constants are field numbers and flags of CRIU's `images/*.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from edgeinfer.errors import DumpError

VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}

#: Field numbers. The prefix names the message: MM_ address space, AREA_ memory area, RUN_ run of pages,
#: FILE_ open file, REG_ regular file, CORE_ task, THREAD_ scheduling of a thread.
MM_AREAS = 14
AREA_START = 1
AREA_END = 2
AREA_OFFSET = 3
AREA_FILE = 4
AREA_FLAGS = 6
AREA_STATUS = 7
AREA_OPEN_FLAGS = 10
RUN_ADDRESS = 1
RUN_PAGES32 = 2
RUN_FLAGS = 4
RUN_PAGES = 5
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
#: Value of FILE_TYPE for a regular file.
REGULAR_FILE = 1
#: STATUS_: flags in the field AREA_STATUS. MAP_: flags of mmap(2) in the field AREA_FLAGS.
STATUS_REGULAR = 1
STATUS_VDSO = 1 << 3
STATUS_FILE_PRIVATE = 1 << 6
STATUS_ANON_PRIVATE = 1 << 9
MAP_PRIVATE = 2
MAP_ANONYMOUS = 0x20
MAP_GROWSDOWN = 0x100


class Field(NamedTuple):
    """A field of a message. `kind` is the wire type; a `value` of bytes may be a nested message."""

    number: int
    kind: int
    value: int | bytes


class ImageMessage(list[Field]):
    """A protobuf message: the list of its fields, in the order of the file."""

    @classmethod
    def of(cls, values: Mapping[int, int | bytes]) -> ImageMessage:
        return cls().with_values(values)

    @classmethod
    def decode(cls, data: int | bytes) -> ImageMessage:
        """Decode a message. Raises DumpError if `data` is a number or not a valid message."""
        if isinstance(data, int):
            raise DumpError("CRIU wrote an image of unknown structure: a number instead of a message")
        message, offset = cls(), 0
        try:
            while offset < len(data):
                key, offset = _varint(data, offset)
                kind = key & 7
                value: int | bytes
                if kind == VARINT:
                    value, offset = _varint(data, offset)
                else:
                    if kind == BYTES:
                        size, offset = _varint(data, offset)
                    else:
                        size = _FIXED_BYTES[kind]
                    value, offset = data[offset : offset + size], offset + size
                message.append(Field(key >> 3, kind, value))
        except (IndexError, KeyError) as error:
            raise DumpError(f"CRIU wrote an image that cannot be decoded: {error!r}") from error
        return message

    def encode(self) -> bytes:
        out = []
        for number, kind, value in self:
            out.append(_encode(number << 3 | kind))
            if isinstance(value, int):
                out.append(_encode(value))
            else:
                out.append((_encode(len(value)) if kind == BYTES else b"") + value)
        return b"".join(out)

    def number(self, field: int) -> int:
        """Return the integer in a field; 0 if the field is absent."""
        return next((value for n, _, value in self if n == field and isinstance(value, int)), 0)

    def parts(self, field: int) -> list[ImageMessage]:
        return [ImageMessage.decode(value) for n, _, value in self if n == field]

    def with_values(self, values: Mapping[int, int | bytes]) -> ImageMessage:
        """Return a copy with these values (by field number); absent fields are appended."""
        fields = [field._replace(value=values.get(field.number, field.value)) for field in self]
        numbers = {field.number for field in self}
        for number, value in values.items():
            if number not in numbers:
                fields.append(Field(number, VARINT if isinstance(value, int) else BYTES, value))
        return ImageMessage(fields)

    def with_parts(self, field: int, parts: Iterable[ImageMessage]) -> ImageMessage:
        """Return a copy in which `parts`, put at the end, replace all fields with number `field`."""
        remaining = [element for element in self if element.number != field]
        return ImageMessage([*remaining, *(Field(field, BYTES, m.encode()) for m in parts)])


class Image(NamedTuple):
    """An image file: its magic number (8 bytes) and its messages."""

    magic: bytes
    messages: list[ImageMessage]


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, offset


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read(path: Path) -> Image:
    """Read an image file: a magic number, then only messages. Raises DumpError for other content."""
    data = path.read_bytes()
    messages = []
    offset = 8
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        offset += 4 + size
        if offset > len(data):
            raise DumpError(f"CRIU wrote a truncated image: {path}")
        messages.append(ImageMessage.decode(data[offset - size : offset]))
    return Image(data[:8], messages)


def write(path: Path, image: Image) -> None:
    raw = [message.encode() for message in image.messages]
    path.write_bytes(image.magic + b"".join(len(m).to_bytes(4, "little") + m for m in raw))
