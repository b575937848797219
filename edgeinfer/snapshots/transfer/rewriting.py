"""Rewrite what CRIU's images say of the exporter: paths of files, user and groups, limits.

Field numbers are those of CRIU's `images/core.proto`, `creds.proto` and `rlimit.proto`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.snapshots.build import images
from edgeinfer.snapshots.build.images import Message

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


def paths(folder: Path) -> list[str]:
    """The files that a process maps or has open. Raises SnapshotCorruptError."""
    return [path for _, path in _numbered(folder)]


def move_files(folder: Path, moved: dict[str, str]) -> None:
    """Name every file by its path here, with its size and mode. Raises OSError where one is missing."""
    path = folder / "files.img"
    image = images.read(path)
    change = {images.FILE_REG: lambda regular: _moved(regular, moved)}
    out = [images.encode(_changed(images.decode(raw), change)) for raw in image.messages]
    images.write(path, images.Image(image.magic, out))


def _changed(message: Message, changes: Mapping[int, Callable[[Message], Message]]) -> Message:
    """Return `message` with the messages inside it changed, by the number of their field."""
    return [
        (n, kind, images.encode(changes[n](images.decode(value))))
        if n in changes and isinstance(value, bytes)
        else (n, kind, value)
        for n, kind, value in message
    ]


def _moved(regular: Message, moved: dict[str, str]) -> Message:
    name = next(os.fsdecode(v) for n, _, v in regular if n == images.REG_NAME and isinstance(v, bytes))
    info = os.stat(moved.get(name, name))
    if not images.number(regular, images.REG_SIZE):
        return regular  # a folder or a device
    changed = [
        (n, kind, os.fsencode(moved.get(name, name)) if n == images.REG_NAME else value)
        for n, kind, value in regular
    ]
    return images.with_number(changed, images.REG_MODE, info.st_mode)


def become_ours(core: Path) -> None:
    """Make the process of this image this user's, with the limits of this process."""
    image = images.read(core)
    first = _changed(images.decode(image.messages[0]), {images.CORE_THREAD: _thread, _CORE_TASK: _task})
    images.write(core, images.Image(image.magic, [images.encode(first), *image.messages[1:]]))


def _thread(thread: Message) -> Message:
    return _changed(thread, {_THREAD_CREDS: _creds})


def _creds(creds: Message) -> Message:
    ours = dict.fromkeys(_CREDS_UIDS, os.getuid()) | dict.fromkeys(_CREDS_GIDS, os.getgid())
    gone = (_CREDS_GROUPS, *_CREDS_LABELS)
    kept: Message = [(n, kind, ours.get(n, value)) for n, kind, value in creds if n not in gone]
    return kept + [(_CREDS_GROUPS, images.VARINT, group) for group in os.getgroups()]


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
            message = images.with_number(images.decode(value), _RLIMIT_SOFT, soft)
            value = images.encode(images.with_number(message, _RLIMIT_HARD, hard))
        out.append((n, kind, value))
    return out


def mapped_ranges(folder: Path, name: str) -> list[Range]:
    """The parts of a file that the process maps; neighbours both in memory and in the file are one."""
    numbers = {number for number, path in _numbered(folder) if path == name}
    found: list[tuple[int, Range]] = []
    for area in _areas(folder):
        if images.number(area, images.AREA_FILE) not in numbers:
            continue
        start, offset = images.number(area, images.AREA_START), images.number(area, images.AREA_OFFSET)
        low, high = offset, offset + images.number(area, images.AREA_END) - start
        if found and found[-1][0] == start - offset and found[-1][1].high == low:
            low = found.pop()[1].low
        found.append((start - offset, Range(low, high)))
    return [one for _, one in found]


def _areas(folder: Path) -> Iterator[Message]:
    for mm in folder.glob("mm-*.img"):
        for n, _, value in images.decode(images.read(mm).messages[0]):
            if n == images.MM_VMAS and isinstance(value, bytes):
                yield images.decode(value)


def _numbered(folder: Path) -> Iterator[tuple[int, str]]:
    for raw in images.read(folder / "files.img").messages:
        entry = images.decode(raw)
        for n, _, value in images.part(entry, images.FILE_REG):
            if n == images.REG_NAME and isinstance(value, bytes):
                yield images.number(entry, images.FILE_ID), os.fsdecode(value)


def make_anonymous(folder: Path, name: str) -> None:
    """Turn private mappings of a file, all of whose pages are in the dump, into anonymous memory."""
    numbers = {number for number, path in _numbered(folder) if path == name}

    def change(area: Message) -> Message:
        return _anonymous(area) if images.number(area, images.AREA_FILE) in numbers else area

    for mm in folder.glob("mm-*.img"):
        image = images.read(mm)
        out = _changed(images.decode(image.messages[0]), {images.MM_VMAS: change})
        images.write(mm, images.Image(image.magic, [images.encode(out)]))
    path = folder / "files.img"
    image = images.read(path)
    files = [(images.number(images.decode(raw), images.FILE_ID), raw) for raw in image.messages]
    kept = [raw for number, raw in files if number not in numbers]
    images.write(path, images.Image(image.magic, kept))


def _anonymous(area: Message) -> Message:
    status = images.number(area, images.AREA_STATUS) & ~images.AREA_FILE_PRIVATE
    changes = {
        images.AREA_OFFSET: 0,
        images.AREA_FILE: 0,
        images.AREA_FLAGS: images.number(area, images.AREA_FLAGS) | images.MAP_ANONYMOUS,
        images.AREA_STATUS: status | images.AREA_ANON_PRIVATE,
    }
    for field, value in changes.items():
        area = images.with_number(area, field, value)
    return [field for field in area if field[0] != images.AREA_OPEN_FLAGS]
