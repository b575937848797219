"""CRIU's image files: a magic number, then length-prefixed protobuf, then raw bytes.

Only as much protobuf as editing needs: a message is a list of (field number, wire type, value), order
and unknown fields kept, so what this module does not know passes through unchanged. The field numbers
below are those of CRIU's `images/*.proto`. The lower half rewrites what an imported snapshot says of
its exporter: paths of files, user and groups, limits.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
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


_CORE_TASK = 3
_TASK_RLIMITS = 8
#: What only some may set: the audit's login, and who goes first when memory is short.
_TASK_PRIVILEGED = (13, 14)
_RLIMIT_SOFT, _RLIMIT_HARD = 1, 2
_THREAD_CREDS = 10
_CREDS_UIDS, _CREDS_GIDS = (1, 3, 5, 7), (2, 4, 6, 8)
_CREDS_GROUPS = 14
#: Security labels of the exporter's machine, none of which a parked process needs.
_CREDS_LABELS = (15, 16, 17)
_UNLIMITED = (1 << 64) - 1


def file_paths(folder: Path) -> list[str]:
    """List the files that a process maps or has open. Raises SnapshotCorruptError."""
    return [path for _, path in _numbered(folder)]


def move_files(folder: Path, moved: dict[str, str]) -> None:
    """Name every file by its path here, with its size and mode. Raises OSError where one is missing."""
    path = folder / "files.img"
    image = read(path)
    change = {FILE_REG: lambda regular: _moved(regular, moved)}
    out = [encode(_changed(decode(raw), change)) for raw in image.messages]
    write(path, Image(image.magic, out))


def _changed(message: Message, changes: Mapping[int, Callable[[Message], Message]]) -> Message:
    """Return `message` with the messages inside it changed, by the number of their field."""
    return [
        (n, kind, encode(changes[n](decode(value))))
        if n in changes and isinstance(value, bytes)
        else (n, kind, value)
        for n, kind, value in message
    ]


def _moved(regular: Message, moved: dict[str, str]) -> Message:
    name = next(os.fsdecode(v) for n, _, v in regular if n == REG_NAME and isinstance(v, bytes))
    info = os.stat(moved.get(name, name))
    if not number(regular, REG_SIZE):
        return regular  # a folder or a device
    changed = [
        (n, kind, os.fsencode(moved.get(name, name)) if n == REG_NAME else value)
        for n, kind, value in regular
    ]
    return with_number(changed, REG_MODE, info.st_mode)


def become_ours(core: Path) -> None:
    """Make the process of this image this user's, with the limits of this process."""
    image = read(core)
    first = _changed(decode(image.messages[0]), {CORE_THREAD: _thread, _CORE_TASK: _task})
    write(core, Image(image.magic, [encode(first), *image.messages[1:]]))


def _thread(thread: Message) -> Message:
    return _changed(thread, {_THREAD_CREDS: _creds})


def _creds(creds: Message) -> Message:
    ours = dict.fromkeys(_CREDS_UIDS, os.getuid()) | dict.fromkeys(_CREDS_GIDS, os.getgid())
    gone = (_CREDS_GROUPS, *_CREDS_LABELS)
    kept: Message = [(n, kind, ours.get(n, value)) for n, kind, value in creds if n not in gone]
    return kept + [(_CREDS_GROUPS, VARINT, group) for group in os.getgroups()]


def _task(task: Message) -> Message:
    kept = [field for field in task if field[0] not in _TASK_PRIVILEGED]
    return _changed(kept, {_TASK_RLIMITS: _limits})


def _limits(limits: Message) -> Message:
    out: Message = []
    for which, (n, kind, value) in enumerate(limits):
        soft, hard = (
            _UNLIMITED if limit == resource.RLIM_INFINITY else limit
            for limit in resource.getrlimit(which)
        )
        if isinstance(value, bytes):
            message = with_number(decode(value), _RLIMIT_SOFT, soft)
            value = encode(with_number(message, _RLIMIT_HARD, hard))
        out.append((n, kind, value))
    return out


def _numbered(folder: Path) -> Iterator[tuple[int, str]]:
    for raw in read(folder / "files.img").messages:
        entry = decode(raw)
        for n, _, value in part(entry, FILE_REG):
            if n == REG_NAME and isinstance(value, bytes):
                yield number(entry, FILE_ID), os.fsdecode(value)


def make_anonymous(folder: Path, name: str) -> None:
    """Turn private mappings of a file, all of whose pages are in the dump, into anonymous memory."""
    numbers = {number for number, path in _numbered(folder) if path == name}

    def change(area: Message) -> Message:
        return _anonymous(area) if number(area, AREA_FILE) in numbers else area

    for mm in folder.glob("mm-*.img"):
        image = read(mm)
        out = _changed(decode(image.messages[0]), {MM_VMAS: change})
        write(mm, Image(image.magic, [encode(out)]))
    path = folder / "files.img"
    image = read(path)
    files = [(number(decode(raw), FILE_ID), raw) for raw in image.messages]
    kept = [raw for number, raw in files if number not in numbers]
    write(path, Image(image.magic, kept))


def _anonymous(area: Message) -> Message:
    status = number(area, AREA_STATUS) & ~AREA_FILE_PRIVATE
    changes = {
        AREA_OFFSET: 0,
        AREA_FILE: 0,
        AREA_FLAGS: number(area, AREA_FLAGS) | MAP_ANONYMOUS,
        AREA_STATUS: status | AREA_ANON_PRIVATE,
    }
    for field, value in changes.items():
        area = with_number(area, field, value)
    return [field for field in area if field[0] != AREA_OPEN_FLAGS]
