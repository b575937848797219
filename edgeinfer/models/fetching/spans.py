"""Which bytes of a partial file are there, kept beside it so that a killed process loses none of them.

`FILE.part.spans` exists only while a file is fetched over several connections: 40 bytes that say since
which start of the machine, then 16 bytes a span, its first byte and its length, little-endian. A
length grows after the bytes it counts were written. Without the file, a partial file is whole from its
beginning.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from edgeinfer.system.disk import size_or_zero, write_whole

SPANS = ".spans"
_HEAD = 40
_ENTRY = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")


def place(part: Path) -> Path:
    """Where the spans of a partial file are kept."""
    return part.with_name(part.name + SPANS)


def fetched_bytes(part: Path) -> int:
    """Count the bytes of the partial file that were fetched."""
    return sum(end - start for start, end in read(part))


def read(part: Path, *, checked: bool = True) -> list[tuple[int, int]]:
    """The fetched stretches as (first byte, end), in order, not touching each other.

    `checked` is false when nothing will compare the whole file with a digest: what a power cut may have
    lost is not counted then.
    """
    size = size_or_zero(part)
    try:
        content = place(part).read_bytes()
    except FileNotFoundError:
        return [(0, size)] if size else []
    if not checked and content[:_HEAD] != _since():
        return []
    spans = content[_HEAD:]
    entries = _ENTRY.iter_unpack(spans[: len(spans) - len(spans) % _ENTRY.size])
    return _merged((start, min(start + length, size)) for start, length in entries)


def drop(part: Path) -> None:
    """Remove a partial file and what is known of it, in the order that a kill cannot twist."""
    part.unlink(missing_ok=True)
    place(part).unlink(missing_ok=True)


def only_beginning(part: Path, *, checked: bool) -> int:
    """Cut the partial file to what is whole from its beginning; its size then."""
    if place(part).exists():
        spans = read(part, checked=checked)
        whole = spans[0][1] if spans and spans[0][0] == 0 else 0
        if part.exists():
            os.truncate(part, whole)
        place(part).unlink()
    return size_or_zero(part)


class SpanFile:
    """The open list of spans of one partial file."""

    def __init__(self, part: Path, spans: list[tuple[int, int]]) -> None:
        entries = b"".join(_ENTRY.pack(start, end - start) for start, end in spans)
        write_whole(place(part), _since() + entries)
        self._file = open(place(part), "r+b", buffering=0)  # noqa: SIM115  # `close` closes it
        self._n = len(spans)

    def add(self, start: int) -> int:
        """Begin an empty span; its number."""
        number = self._n
        self._n += 1
        os.pwrite(self._file.fileno(), _ENTRY.pack(start, 0), _HEAD + number * _ENTRY.size)
        return number

    def grow(self, number: int, length: int) -> None:
        """The span has `length` bytes now, which were written before."""
        at = _HEAD + number * _ENTRY.size + _LENGTH.size
        os.pwrite(self._file.fileno(), _LENGTH.pack(length), at)

    def close(self) -> None:
        self._file.close()


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _since() -> bytes:
    """This start of the machine, in 40 bytes: what was written since then no power cut has lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:_HEAD].ljust(_HEAD)
    except OSError:
        return b"unknown".ljust(_HEAD)
